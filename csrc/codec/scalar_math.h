// The only quantization arithmetic: how a group's scale and zero follow from its values, and a code from a value.
// Every operation is IEEE float32, rounded to nearest even, never fused, so that all processors give the same bytes.
#pragma once

#include <cstdint>

#include "base/api.h"
#include "base/float_bits.h"

namespace pipecomm {

inline constexpr std::uint32_t kSignBit = 0x80000000u;
inline constexpr std::uint32_t kInfinityBits = 0x7f800000u;
inline constexpr std::uint16_t kNanBf16 = 0x7fc0;
inline constexpr std::uint16_t kMinNormalBf16 = 0x0080;
inline constexpr std::uint16_t kMinusMaxBf16 = 0xff7f;
inline constexpr float kMaxInt8Code = 127.0f;
inline constexpr float kMaxInt4Code = 15.0f;

#if defined(__CUDA_ARCH__)
PC_HD inline float multiply(float a, float b) { return __fmul_rn(a, b); }
PC_HD inline float add(float a, float b) { return __fadd_rn(a, b); }
PC_HD inline float subtract(float a, float b) { return __fsub_rn(a, b); }
PC_HD inline float divide(float a, float b) { return __fdiv_rn(a, b); }
#else
PC_HD inline float multiply(float a, float b) { return a * b; }
PC_HD inline float add(float a, float b) { return a + b; }
PC_HD inline float subtract(float a, float b) { return a - b; }
PC_HD inline float divide(float a, float b) { return a / b; }
#endif

// Nearest integer, ties to even, for |value| < 2^22: the sum's mantissa holds it.
PC_HD inline std::int32_t round_to_int(float value) {
  return static_cast<std::int32_t>(float_to_bits(add(value, 12582912.0f)) - 0x4b400000u);
}

PC_HD inline bool is_finite_bits(std::uint32_t bits) { return (bits & ~kSignBit) < kInfinityBits; }

// A float's bits as an integer that orders as the float does; NaN lies beyond the infinities. Its own inverse.
PC_HD inline std::int32_t order_key(std::uint32_t bits) {
  return static_cast<std::int32_t>((bits & kSignBit) != 0 ? bits ^ ~kSignBit : bits);
}

PC_HD inline Bf16 bf16_round_down(float value) {
  const std::uint32_t bits = float_to_bits(value);
  return Bf16{static_cast<std::uint16_t>((bits & kSignBit) != 0 ? (bits + 0xffffu) >> 16 : bits >> 16)};
}

// For value >= 0.
PC_HD inline Bf16 bf16_round_up(float value) {
  return Bf16{static_cast<std::uint16_t>((float_to_bits(value) + 0xffffu) >> 16)};
}

// How to code one group. A group that holds NaN or infinity has the scale NaN, and codes of 0.
struct Int8Group {
  Bf16 scale;
  float inverse;

  PC_HD bool is_finite() const { return scale.bits != kNanBf16; }
};

// `magnitude_bits`: the largest bit pattern among the group's |x|.
PC_HD inline Int8Group int8_group(std::uint32_t magnitude_bits) {
  if (magnitude_bits >= kInfinityBits) return {Bf16{kNanBf16}, 0.0f};
  // Up to 2^-127 every code would be 0 under the smallest scale.
  if (magnitude_bits <= 0x00400000u) return {Bf16{0}, 0.0f};
  // Rounding the scale to nearest moves |x| / scale to 127.5 at most, excluded: no code exceeds 127.
  Bf16 scale = float_to_bf16(divide(bits_to_float(magnitude_bits), kMaxInt8Code));
  // Subnormal scales are too coarse to cover the group.
  if (scale.bits < kMinNormalBf16) scale.bits = kMinNormalBf16;
  return {scale, divide(1.0f, to_float(scale))};
}

PC_HD inline std::int32_t quantize_int8(float value, float inverse) { return round_to_int(multiply(value, inverse)); }

PC_HD inline float dequantize_int8(std::int32_t code, float scale) { return multiply(static_cast<float>(code), scale); }

// Differences are taken of halves, because max - min of a group can exceed the largest float.
struct Int4Group {
  Bf16 scale;
  Bf16 zero;
  float half_zero;
  float inverse;  // 2 / scale

  PC_HD bool is_finite() const { return scale.bits != kNanBf16; }
};

// `low` and `high`: order keys of the group's smallest and largest value.
PC_HD inline Int4Group int4_group(std::int32_t low, std::int32_t high) {
  const std::uint32_t low_bits = static_cast<std::uint32_t>(order_key(static_cast<std::uint32_t>(low)));
  const std::uint32_t high_bits = static_cast<std::uint32_t>(order_key(static_cast<std::uint32_t>(high)));
  if (!is_finite_bits(low_bits) || !is_finite_bits(high_bits)) return {Bf16{kNanBf16}, Bf16{0}, 0.0f, 0.0f};
  Bf16 zero = bf16_round_down(bits_to_float(low_bits));
  // float32 below the smallest bf16 is coded as if it were that.
  if (zero.bits > kMinusMaxBf16) zero.bits = kMinusMaxBf16;
  if (zero.bits == 0x8000u) zero.bits = 0;
  const float half_zero = multiply(to_float(zero), 0.5f);
  const float half_range = subtract(multiply(bits_to_float(high_bits), 0.5f), half_zero);
  if (!(half_range > 0.0f)) return {Bf16{0}, zero, half_zero, 0.0f};
  Bf16 scale = bf16_round_up(divide(half_range, kMaxInt4Code / 2));
  if (scale.bits < kMinNormalBf16) scale.bits = kMinNormalBf16;
  return {scale, zero, half_zero, divide(2.0f, to_float(scale))};
}

PC_HD inline std::int32_t quantize_int4(float value, float half_zero, float inverse) {
  const float steps = multiply(subtract(multiply(value, 0.5f), half_zero), inverse);
  // Above 15 only by the rounding of `steps`; below 0 only where `zero` was held at the smallest bf16.
  return round_to_int(steps > 0.0f ? steps : 0.0f);
}

PC_HD inline float dequantize_int4(std::int32_t code, float scale, float zero) {
  return add(zero, multiply(static_cast<float>(code), scale));
}

template <typename T>
PC_HD inline float max_finite();
template <>
PC_HD inline float max_finite<float>() {
  return 3.4028234663852886e38f;
}
template <>
PC_HD inline float max_finite<Bf16>() {
  return 3.3895313892515355e38f;
}
template <>
PC_HD inline float max_finite<Fp16>() {
  return 65504.0f;
}

PC_HD inline float magnitude(float value) { return value < 0.0f ? -value : value; }

// True where no decoded value of the group can overflow T, and scale and zero are finite.
template <typename T>
PC_HD inline bool decodes_in_range(float scale, float zero, float max_code) {
  return add(magnitude(zero), multiply(max_code, magnitude(scale))) <= max_finite<T>();
}

// The decoded value as T: at most the largest finite T, and NaN where the group's scale or zero is not finite.
template <typename T>
PC_HD inline T finish_decode(float value, float scale, float zero) {
  if (!is_finite_bits(float_to_bits(scale)) || !is_finite_bits(float_to_bits(zero))) {
    return from_float<T>(bits_to_float(0x7fc00000u));
  }
  const float limit = max_finite<T>();
  const float above = value < -limit ? -limit : value;
  return from_float<T>(above > limit ? limit : above);
}

}  // namespace pipecomm
