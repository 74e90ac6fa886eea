// bfloat16 and float16 as bit patterns, with conversions that give the same bits on host and device.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/api.h"

namespace pipecomm {

struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};

PC_HD inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

PC_HD inline float bits_to_float(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

PC_HD inline float to_float(float value) { return value; }

PC_HD inline float to_float(Bf16 value) { return bits_to_float(static_cast<std::uint32_t>(value.bits) << 16); }

PC_HD inline float to_float(Fp16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal: magnitude * 2^-24 is exact in float32.
  const float scaled = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
  return bits_to_float(sign | float_to_bits(scaled));
}

// Round to nearest even; NaN stays NaN (quiet), overflow becomes infinity.
PC_HD inline Bf16 float_to_bf16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return Bf16{static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return Bf16{static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

PC_HD inline Fp16 float_to_fp16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return Fp16{static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu))};
  // 65520 is the smallest value that rounds to infinity.
  if (magnitude >= 0x477ff000u) return Fp16{static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude >= 0x38800000u) {
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return Fp16{static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
  }
  // Subnormal result: adding 0.5 aligns the wanted bits with the end of the mantissa, rounded to nearest even.
  const float aligned = bits_to_float(magnitude) + 0.5f;
  return Fp16{static_cast<std::uint16_t>(sign | (float_to_bits(aligned) - 0x3f000000u))};
}

// Convert float32 to the value type T (float, Bf16 or Fp16).
template <typename T>
PC_HD inline T from_float(float value);
template <>
PC_HD inline float from_float<float>(float value) {
  return value;
}
template <>
PC_HD inline Bf16 from_float<Bf16>(float value) {
  return float_to_bf16(value);
}
template <>
PC_HD inline Fp16 from_float<Fp16>(float value) {
  return float_to_fp16(value);
}

}  // namespace pipecomm
