// The option spikes=1|2|4: the values of largest magnitude of a group are kept beside its codes, and out of its scale.
// One after the other, the value of largest magnitude (the first of several) is written down with its place, and the
// group goes on with a stand-in there: 0, or where a group has a zero its value of smallest magnitude. What is then
// left is coded as usual. Decoding puts the spikes back, the first one last: it counts where two share a place.
#pragma once

#include <cstdint>

#include "codec/scalar_math.h"

namespace pipecomm {

inline constexpr int kMaxSpikes = 4;

// bf16 bits of a spike: rounded to nearest, and infinite or NaN only where the value is.
PC_HD inline std::uint16_t spike_bits(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if (!is_finite_bits(bits)) return float_to_bf16(value).bits;
  const std::uint16_t sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const std::uint16_t size = bf16_round_nearest(bits_to_float(bits & ~kSignBit)).bits;
  // -0 becomes +0.
  return size == 0 ? size : static_cast<std::uint16_t>(sign | (size < kMaxBf16 ? size : kMaxBf16));
}

// A finite spike stays finite in T.
template <typename T>
PC_HD inline T spike_value(float spike) {
  return is_finite_bits(float_to_bits(spike)) ? finish_decode<T>(spike, 0.0f, 0.0f) : from_float<T>(spike);
}

}  // namespace pipecomm
