// The kernels' part in spikes.h: the lanes of a group find its spikes together, and put them back each on its own.
#pragma once

#include "codec/kernels.cuh"
#include "codec/spikes.h"

namespace pipecomm {

__device__ inline std::uint32_t smaller(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }

template <int kLanes>
__device__ inline std::uint32_t min_of_lanes(std::uint32_t value) {
  return ~max_of_lanes<kLanes>(~value);
}

// The places of a group that its scale does not see.
struct Spikes {
  std::uint32_t places = UINT32_MAX;  // a byte each; an array would not stay in registers
  float stand_in = 0.0f;

  __device__ bool has(int i) const {
    bool found = false;
    for (int s = 0; s < kMaxSpikes; ++s) found |= (places >> (8 * s) & 0xffu) == static_cast<std::uint32_t>(i);
    return found;
  }
  __device__ float at(int i, float value) const { return has(i) ? stand_in : value; }
};

// The group's value of smallest magnitude, the first of several. `visit` calls its argument with the place and value
// of each of the lane's own values.
template <int kLanes, typename Visit>
__device__ inline float smallest(const Visit& visit) {
  std::uint32_t least = UINT32_MAX;
  visit([&](int, float value) { least = smaller(float_to_bits(value) & ~kSignBit, least); });
  least = min_of_lanes<kLanes>(least);
  std::uint32_t first = UINT32_MAX;
  std::uint32_t bits = 0;
  visit([&](int i, float value) {
    const bool is_first = (float_to_bits(value) & ~kSignBit) == least && static_cast<std::uint32_t>(i) < first;
    first = is_first ? static_cast<std::uint32_t>(i) : first;
    bits = is_first ? float_to_bits(value) : bits;
  });
  const std::uint32_t place = min_of_lanes<kLanes>(first);
  return bits_to_float(max_of_lanes<kLanes>(first == place ? bits : 0));
}

// Writes down the spikes of group `index` of the run.
template <int kLanes, typename Visit>
__device__ inline Spikes take_spikes(const RunLayout& run, std::int64_t index, const Visit& visit,
                                     unsigned char* wire) {
  Spikes spikes;
  if (run.has_zeros) spikes.stand_in = smallest<kLanes>(visit);
  for (int s = 0; s < run.num_spikes; ++s) {
    const auto size_of = [&](int i, float value) { return float_to_bits(spikes.at(i, value)) & ~kSignBit; };
    std::uint32_t largest = 0;
    visit([&](int i, float value) { largest = ~smaller(~size_of(i, value), ~largest); });
    largest = max_of_lanes<kLanes>(largest);
    std::uint32_t first = UINT32_MAX;
    visit([&](int i, float value) {
      if (size_of(i, value) == largest) first = smaller(static_cast<std::uint32_t>(i), first);
    });
    const std::uint32_t place = min_of_lanes<kLanes>(first);
    const std::int64_t spike = index * run.num_spikes + s;
    visit([&](int i, float value) {
      if (static_cast<std::uint32_t>(i) != place) return;
      store_bf16(wire + run.spikes_offset + spike * 2, spike_bits(spikes.at(i, value)));
      wire[run.places_offset + spike] = static_cast<unsigned char>(place);
    });
    spikes.places = spikes.places << 8 | place;
  }
  return spikes;
}

// Calls put(place, value) for the spikes of group `index` of the run, in the order in which they are to be written.
template <typename T, typename Put>
__device__ inline void for_each_spike(const RunLayout& run, std::int64_t index, const unsigned char* wire,
                                      const Put& put) {
  for (int s = run.num_spikes - 1; s >= 0; --s) {
    const std::int64_t spike = index * run.num_spikes + s;
    put(static_cast<int>(wire[run.places_offset + spike]),
        spike_value<T>(load_bf16(wire + run.spikes_offset + spike * 2)));
  }
}

}  // namespace pipecomm
