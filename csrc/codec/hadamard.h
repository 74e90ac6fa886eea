// The transform of hadamard=64: blocks of 64 neighbouring values of a row, with fixed random signs, times the
// Walsh-Hadamard matrix H. Encoding codes v = H D x / 64, decoding gives D H v, since H H = 64 I and D D = I: both
// factors are powers of two, and no sum of the encoder exceeds the block's largest |x|.
#pragma once

#include <cstdint>

#include "base/api.h"

namespace pipecomm {

inline constexpr int kTransformWidth = 64;
// Value i changes its sign where bit i is set: the first 64 bits of pi's fraction.
inline constexpr std::uint64_t kTransformSigns = 0x243f6a8885a308d3u;
inline constexpr float kTransformScale = 1.0f / 64;
// Decoding works on values times this: sums of 64 values of any scale stay in range, and nothing a bf16 scale of
// normal size can say is lost. The result is multiplied by the inverse.
inline constexpr float kGuard = 1.0f / 65536;

struct TransformFactors {
  float at[kTransformWidth];
};

constexpr TransformFactors make_transform_factors(float factor) {
  TransformFactors factors{};
  for (int i = 0; i < kTransformWidth; ++i) factors.at[i] = (kTransformSigns >> i & 1u) != 0 ? -factor : factor;
  return factors;
}

// By these the encoder multiplies before the butterflies, and the decoder after them.
inline constexpr TransformFactors kEncodeFactors = make_transform_factors(kTransformScale);
inline constexpr TransformFactors kDecodeFactors = make_transform_factors(1.0f / kGuard);

PC_HD inline float transform_factor(int i, float factor) { return (kTransformSigns >> i & 1u) != 0 ? -factor : factor; }

// The butterflies in the order that is part of the format: distance 1, 2, 4, ... up to 32.
PC_HD inline void butterflies(float* v) {
  for (int distance = 1; distance < kTransformWidth; distance *= 2) {
    for (int i = 0; i < kTransformWidth; ++i) {
      if ((i & distance) != 0) continue;
      const float a = v[i];
      const float b = v[i + distance];
      v[i] = a + b;
      v[i + distance] = a - b;
    }
  }
}

}  // namespace pipecomm
