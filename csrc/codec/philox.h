// The noise of stochastic rounding: Philox4x32-10 (Salmon et al., SC 2011), a function of seed, sequence and element.
// One call gives 16 bits for each of eight values.
#pragma once

#include <cstdint>

#include "codec/scalar_math.h"

namespace pipecomm {

inline constexpr int kNoisePerCall = 8;

struct PhiloxWords {
  std::uint32_t word[4];
};

PC_HD inline PhiloxWords philox4x32(PhiloxWords counter, std::uint32_t key0, std::uint32_t key1) {
#if !defined(__CUDACC__)
// A loop over calls vectorizes only if no other loop is inside it.
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xd2511f53u} * counter.word[0];
    const std::uint64_t b = std::uint64_t{0xcd9e8d57u} * counter.word[2];
    counter = {{static_cast<std::uint32_t>(b >> 32) ^ counter.word[1] ^ key0, static_cast<std::uint32_t>(b),
                static_cast<std::uint32_t>(a >> 32) ^ counter.word[3] ^ key1, static_cast<std::uint32_t>(a)}};
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return counter;
}

// What the noise of one encoded message depends on, besides the element.
struct NoiseKey {
  std::uint64_t seed = 0;
  std::uint64_t sequence = 0;

  // For elements 8 * index .. 8 * index + 7, counted over groups as if all were full.
  PC_HD PhiloxWords words(std::uint64_t index) const {
    return philox4x32({{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                        static_cast<std::uint32_t>(sequence), static_cast<std::uint32_t>(sequence >> 32)}},
                      static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
  }
};

// Noise number i of eight: evenly spread over 65536 odd multiples of 2^-17 within (-1/2, 1/2), so that a value on the
// grid stays and the mean is exact. The low halves of the words come first.
PC_HD inline float noise_of(const PhiloxWords& words, int i) {
  const std::uint32_t even = (i & 2) != 0 ? words.word[2] : words.word[0];
  const std::uint32_t odd_word = (i & 2) != 0 ? words.word[3] : words.word[1];
  const std::uint32_t word = (i & 1) != 0 ? odd_word : even;
  const std::uint32_t half = i < 4 ? word & 0xffffu : word >> 16;
  const std::int32_t odd = static_cast<std::int32_t>(2 * half + 1) - 65536;
  return multiply(static_cast<float>(odd), 7.62939453125e-06f);
}

}  // namespace pipecomm
