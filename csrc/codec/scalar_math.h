// What the codecs' arithmetic (rules.h) is made of: float32 operations, roundings, orders, and the way out of float32.
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
inline constexpr std::uint16_t kMaxBf16 = 0x7f7f;

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
PC_HD inline bool decodes_in_range(float scale, float zero, float max_level) {
  return add(magnitude(zero), multiply(max_level, magnitude(scale))) <= max_finite<T>();
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
