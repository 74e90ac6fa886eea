// The codecs' arithmetic, once for host and CUDA: how a group's scale and zero follow from its extremes, a code from a
// value, and a value from a code. A rule has
//   kCodeBits, kIsSymmetric   symmetric groups have no zero, and are known by their largest magnitude
//   kMaxLevel                 no code stands for more scales than this
//   group, quantize           and for integer rules quantize with noise: stochastic rounding
//   level                     what a code stands for, in scales
#pragma once

#include <cstdint>

#include "codec/scalar_math.h"

namespace pipecomm {

// How to code one group. A group that holds NaN or infinity has the scale NaN, and codes of 0.
struct GroupCode {
  std::uint32_t scale;  // bf16 bits, as 32 so that loops over groups vectorize
  std::uint32_t zero;
  float half_zero;
  float inverse;  // 1 / scale, or 2 / scale where there is a zero; 0 where every code is that of 0

  PC_HD bool is_finite() const { return scale != kNanBf16; }
  // What stochastic rounding divides by: a quotient, unlike a product with the inverse, is exact on the grid.
  PC_HD float divisor() const { return inverse == 0.0f ? 1.0f : bits_to_float(scale << 16); }
};

// `magnitude_bits`: the largest bit pattern among the group's |x|; up to `zero_bits` every code would be 0 under the
// smallest scale. Free of branches, so that loops over groups vectorize.
PC_HD inline GroupCode symmetric_group(std::uint32_t magnitude_bits, float max_level, std::uint32_t zero_bits,
                                       bool rounds_up) {
  const float quotient = divide(bits_to_float(magnitude_bits), max_level);
  const std::uint32_t nearest = bf16_round_nearest(quotient).bits;
  const std::uint32_t above = bf16_round_up(quotient).bits;
  std::uint32_t scale = rounds_up ? above : nearest;
  // Subnormal scales are too coarse to cover the group.
  scale = scale < kMinNormalBf16 ? kMinNormalBf16 : scale;
  scale = scale > kMaxBf16 ? kMaxBf16 : scale;
  const float inverse = divide(1.0f, bits_to_float(scale << 16));
  const bool is_zero = magnitude_bits <= zero_bits;
  const bool is_finite = magnitude_bits < kInfinityBits;
  scale = is_zero ? 0 : scale;
  scale = is_finite ? scale : kNanBf16;
  return {scale, 0, 0.0f, is_zero || !is_finite ? 0.0f : inverse};
}

// `low_bits` and `high_bits`: the group's smallest and largest value, by order key. Differences are taken of halves,
// because max - min of a group can exceed the largest float. Free of branches, as above.
PC_HD inline GroupCode asymmetric_group(std::uint32_t low_bits, std::uint32_t high_bits, float max_level) {
  std::uint32_t zero = bf16_round_down(bits_to_float(low_bits)).bits;
  // float32 below the smallest bf16 is coded as if it were that.
  zero = zero > kMinusMaxBf16 ? kMinusMaxBf16 : zero;
  zero = zero == 0x8000u ? 0 : zero;
  const float half_zero = multiply(bits_to_float(zero << 16), 0.5f);
  const float half_range = subtract(multiply(bits_to_float(high_bits), 0.5f), half_zero);
  std::uint32_t scale = bf16_round_up(divide(half_range, max_level / 2)).bits;
  scale = scale < kMinNormalBf16 ? kMinNormalBf16 : scale;
  const float inverse = divide(2.0f, bits_to_float(scale << 16));
  const bool is_flat = !(half_range > 0.0f);
  const bool is_finite = is_finite_bits(low_bits) && is_finite_bits(high_bits);
  scale = is_flat ? 0 : scale;
  scale = is_finite ? scale : kNanBf16;
  zero = is_finite ? zero : 0;
  return {scale, zero, half_zero, is_flat || !is_finite ? 0.0f : inverse};
}

PC_HD inline float clamp(float value, float low, float high) {
  const float above = value < low ? low : value;
  return above > high ? high : above;
}

// 2^-127: half of the smallest scale.
inline constexpr std::uint32_t kHalfMinScaleBits = 0x00400000u;

// Symmetric integers: codes -kMax .. kMax in two's complement.
template <int kBits>
struct SymmetricRule {
  static constexpr int kCodeBits = kBits;
  static constexpr bool kIsSymmetric = true;
  static constexpr bool kIsInteger = true;
  static constexpr float kMax = (1 << (kBits - 1)) - 1;
  static constexpr float kMaxLevel = kMax + 1;

  // Rounding the scale to nearest moves |x| / scale to kMax + 1/2 at most, excluded: no code exceeds kMax. Noise asks
  // for a scale rounded up, or the largest value would be biased.
  PC_HD static GroupCode group(std::uint32_t, std::uint32_t magnitude_bits, bool is_stochastic) {
    return symmetric_group(magnitude_bits, kMax, kHalfMinScaleBits, is_stochastic);
  }
  PC_HD static std::int32_t quantize(float value, const GroupCode& group) {
    return round_to_int(multiply(value, group.inverse));
  }
  PC_HD static std::int32_t quantize(float value, const GroupCode& group, float noise) {
    return round_to_int(clamp(add(divide(value, group.divisor()), noise), -kMax, kMax));
  }
  PC_HD static constexpr float level(std::uint32_t code) {
    constexpr std::uint32_t kSign = 1u << (kBits - 1);
    return static_cast<float>(static_cast<std::int32_t>((code & (2 * kSign - 1)) ^ kSign) -
                              static_cast<std::int32_t>(kSign));
  }
};

using Int8Rule = SymmetricRule<8>;
using Int4SymmetricRule = SymmetricRule<4>;

struct Int4Rule {
  static constexpr int kCodeBits = 4;
  static constexpr bool kIsSymmetric = false;
  static constexpr bool kIsInteger = true;
  static constexpr float kMaxLevel = 15.0f;

  PC_HD static GroupCode group(std::uint32_t low_bits, std::uint32_t high_bits, bool) {
    return asymmetric_group(low_bits, high_bits, kMaxLevel);
  }
  PC_HD static std::int32_t quantize(float value, const GroupCode& group) {
    const float steps = multiply(subtract(multiply(value, 0.5f), group.half_zero), group.inverse);
    // Above 15 only by the rounding of `steps`; below 0 only where `zero` was held at the smallest bf16, for float32.
    return round_to_int(steps > 0.0f ? steps : 0.0f);
  }
  PC_HD static std::int32_t quantize(float value, const GroupCode& group, float noise) {
    const float half = subtract(multiply(value, 0.5f), group.half_zero);
    const float steps = divide(half, multiply(group.divisor(), 0.5f));
    return round_to_int(clamp(add(steps, noise), 0.0f, kMaxLevel));
  }
  PC_HD static constexpr float level(std::uint32_t code) { return static_cast<float>(code & 15u); }
};

// Nearest e4m3 (4 bits of exponent, 3 of mantissa, no infinity), ties to even, for |value| < 464; -0 becomes +0.
PC_HD inline std::uint32_t e4m3_round(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t magnitude = bits & ~kSignBit;
  const std::uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6, multiples of 2^-9: what the sum's mantissa holds.
  const std::uint32_t subnormal = float_to_bits(add(bits_to_float(magnitude), 16384.0f)) - 0x46800000u;
  const std::uint32_t code = magnitude < 0x3c800000u ? subnormal : normal;
  return code == 0 ? 0 : code | ((bits >> 24) & 0x80u);
}

// 480 for the pattern that e4m3 has for NaN: no group is coded with it.
PC_HD inline float e4m3_value(std::uint32_t code) {
  const std::uint32_t magnitude = code & 0x7fu;
  const std::uint32_t normal = (magnitude << 20) + (120u << 23);
  // Below 2^-6, multiples of 2^-9: the difference to 2^-6 of a number just above it.
  const std::uint32_t subnormal = float_to_bits(subtract(bits_to_float(normal + (1u << 23)), 0.015625f));
  return bits_to_float((magnitude < 8 ? subnormal : normal) | (code & 0x80u) << 24);
}

struct Fp8Rule {
  static constexpr int kCodeBits = 8;
  static constexpr bool kIsSymmetric = true;
  static constexpr bool kIsInteger = false;
  static constexpr float kMaxLevel = 480.0f;

  PC_HD static GroupCode group(std::uint32_t, std::uint32_t magnitude_bits, bool) {
    return symmetric_group(magnitude_bits, 448.0f, 0, false);
  }
  PC_HD static std::int32_t quantize(float value, const GroupCode& group) {
    return static_cast<std::int32_t>(e4m3_round(multiply(value, group.inverse)));
  }
  PC_HD static float level(std::uint32_t code) { return e4m3_value(code); }
};

// The 16 levels of QLoRA (arXiv 2305.14314, appendix E): quantiles of the normal distribution, with an exact 0.
struct SixteenFloats {
  float at[16];
};
PC_HD constexpr SixteenFloats nf4_levels() {
  return {{-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
           -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
           0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f,
           1.0f}};
}

// Above bound i the nearest level is i + 1 or more; nothing is above the last.
PC_HD constexpr SixteenFloats nf4_bounds() {
  constexpr SixteenFloats kLevels = nf4_levels();
  SixteenFloats bounds{};
  for (int i = 0; i < 15; ++i) bounds.at[i] = (kLevels.at[i] + kLevels.at[i + 1]) * 0.5f;
  bounds.at[15] = 3e38f;
  return bounds;
}

struct Nf4Rule {
  static constexpr int kCodeBits = 4;
  static constexpr bool kIsSymmetric = true;
  static constexpr bool kIsInteger = false;
  static constexpr float kMaxLevel = 1.0f;

  PC_HD static GroupCode group(std::uint32_t, std::uint32_t magnitude_bits, bool) {
    return symmetric_group(magnitude_bits, 1.0f, 0, false);
  }
  PC_HD static std::int32_t quantize(float value, const GroupCode& group) {
    constexpr SixteenFloats kBounds = nf4_bounds();
    const float fraction = multiply(value, group.inverse);
    std::int32_t code = 0;
    for (int i = 0; i < 15; ++i) code += fraction > kBounds.at[i] ? 1 : 0;
    return code;
  }
  PC_HD static constexpr float level(std::uint32_t code) {
    constexpr SixteenFloats kLevels = nf4_levels();
    return kLevels.at[code & 15u];
  }
};

// The value of a level. Where there is a zero, level * scale alone can exceed the largest float: then halves are added.
// Only then: half of a subnormal number need not be a float.
template <class Rule>
PC_HD inline float dequantize(float level, float scale, float zero) {
  if constexpr (Rule::kIsSymmetric && Rule::kCodeBits == 4) {
    // As with a zero of 0, which makes +0 of -0.
    return add(multiply(level, scale), 0.0f);
  } else if constexpr (Rule::kIsSymmetric) {
    return multiply(level, scale);
  } else {
    if (decodes_in_range<float>(scale, zero, Rule::kMaxLevel)) return add(zero, multiply(level, scale));
    const float steps = multiply(level, multiply(scale, 0.5f));
    return multiply(add(multiply(zero, 0.5f), steps), 2.0f);
  }
}

}  // namespace pipecomm
