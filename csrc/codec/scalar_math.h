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

// A float's bits, of any width, as an unsigned integer that orders as the float does; NaN lies beyond the infinities.
template <typename Bits>
PC_HD constexpr Bits order_key(Bits bits) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  return static_cast<Bits>((bits & kSign) != 0 ? ~bits : bits | kSign);
}

// Inverse of order_key.
template <typename Bits>
PC_HD constexpr Bits key_bits(Bits key) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  return static_cast<Bits>((key & kSign) != 0 ? key ^ kSign : ~key);
}

// These three take finite values; what they make of others is not used.
PC_HD inline Bf16 bf16_round_nearest(float value) {
  const std::uint32_t bits = float_to_bits(value);
  return Bf16{static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

PC_HD inline Bf16 bf16_round_down(float value) {
  const std::uint32_t bits = float_to_bits(value);
  return Bf16{static_cast<std::uint16_t>((bits & kSignBit) != 0 ? (bits + 0xffffu) >> 16 : bits >> 16)};
}

// For value >= 0 only.
PC_HD inline Bf16 bf16_round_up(float value) {
  return Bf16{static_cast<std::uint16_t>((float_to_bits(value) + 0xffffu) >> 16)};
}

// How to code one group. A group that holds NaN or infinity has the scale NaN, and codes of 0.
struct Int8Group {
  Bf16 scale;
  float inverse;

  PC_HD bool is_finite() const { return scale.bits != kNanBf16; }
};

// `magnitude_bits`: the largest bit pattern among the group's |x|. Free of branches, so that loops over groups
// vectorize.
PC_HD inline Int8Group int8_group(std::uint32_t magnitude_bits) {
  // Rounding the scale to nearest moves |x| / scale to 127.5 at most, excluded: no code exceeds 127.
  std::uint32_t bits = bf16_round_nearest(divide(bits_to_float(magnitude_bits), kMaxInt8Code)).bits;
  // Subnormal scales are too coarse to cover the group.
  bits = bits < kMinNormalBf16 ? kMinNormalBf16 : bits;
  const float inverse = divide(1.0f, bits_to_float(bits << 16));
  // Up to 2^-127 every code would be 0 under the smallest scale.
  const bool is_zero = magnitude_bits <= 0x00400000u;
  const bool is_finite = magnitude_bits < kInfinityBits;
  bits = is_zero ? 0 : bits;
  bits = is_finite ? bits : kNanBf16;
  return {Bf16{static_cast<std::uint16_t>(bits)}, is_zero || !is_finite ? 0.0f : inverse};
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

// `low_bits` and `high_bits`: the group's smallest and largest value, by order key. Free of branches, as int8_group.
PC_HD inline Int4Group int4_group(std::uint32_t low_bits, std::uint32_t high_bits) {
  std::uint32_t zero = bf16_round_down(bits_to_float(low_bits)).bits;
  // float32 below the smallest bf16 is coded as if it were that.
  zero = zero > kMinusMaxBf16 ? kMinusMaxBf16 : zero;
  zero = zero == 0x8000u ? 0 : zero;
  const float half_zero = multiply(bits_to_float(zero << 16), 0.5f);
  const float half_range = subtract(multiply(bits_to_float(high_bits), 0.5f), half_zero);
  std::uint32_t scale = bf16_round_up(divide(half_range, kMaxInt4Code / 2)).bits;
  scale = scale < kMinNormalBf16 ? kMinNormalBf16 : scale;
  const float inverse = divide(2.0f, bits_to_float(scale << 16));
  const bool is_flat = !(half_range > 0.0f);
  const bool is_finite = is_finite_bits(low_bits) && is_finite_bits(high_bits);
  scale = is_flat ? 0 : scale;
  scale = is_finite ? scale : kNanBf16;
  zero = is_finite ? zero : 0;
  return {Bf16{static_cast<std::uint16_t>(scale)}, Bf16{static_cast<std::uint16_t>(zero)}, half_zero,
          is_flat || !is_finite ? 0.0f : inverse};
}

PC_HD inline std::int32_t quantize_int4(float value, float half_zero, float inverse) {
  const float steps = multiply(subtract(multiply(value, 0.5f), half_zero), inverse);
  // Above 15 only by the rounding of `steps`; below 0 only where `zero` was held at the smallest bf16, for float32.
  return round_to_int(steps > 0.0f ? steps : 0.0f);
}

// code * scale alone can exceed the largest float; halves are exact. Where the group decodes in range, this is
// zero + code * scale, bit for bit.
PC_HD inline float dequantize_int4(std::int32_t code, float scale, float zero) {
  const float steps = multiply(static_cast<float>(code), multiply(scale, 0.5f));
  return multiply(add(multiply(zero, 0.5f), steps), 2.0f);
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
