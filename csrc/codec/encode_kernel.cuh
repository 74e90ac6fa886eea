// The encode kernel of every codec: one pass, a lane keeps its values in registers.
#pragma once

#include "codec/spikes.cuh"

namespace pipecomm {

// How a kernel rounds.
struct KernelNoise {
  NoiseKey key;
  bool is_stochastic = false;
};

// Zeros between the sections, by the first block.
__device__ inline void clear_padding(const RunLayout& run, unsigned char* wire) {
  if (blockIdx.x != 0) return;
  const std::int64_t used = run.num_groups * 2;
  const auto thread = static_cast<std::int64_t>(threadIdx.x);
  if (used + thread >= run.zeros_offset) return;
  wire[used + thread] = 0;
  if (run.has_zeros) wire[run.zeros_offset + used + thread] = 0;
}

// The same behind the spikes and their places: fewer than a block has threads.
__device__ inline void clear_spike_padding(const RunLayout& run, unsigned char* wire) {
  if (blockIdx.x != 0) return;
  const std::int64_t used = run.num_groups * run.num_spikes;
  const auto thread = static_cast<std::int64_t>(threadIdx.x);
  if (run.spikes_offset + used * 2 + thread < run.places_offset) wire[run.spikes_offset + used * 2 + thread] = 0;
  if (run.places_offset + used + thread < run.codes_offset) wire[run.places_offset + used + thread] = 0;
}

// The code of value number i of eight; its low kCodeBits are what is stored.
template <class Rule>
__device__ inline std::uint32_t code_of(float value, const GroupCode& group, const KernelNoise& noise,
                                        const PhiloxWords& words, int i) {
  if (!group.is_finite()) return 0;
  if constexpr (Rule::kIsInteger) {
    if (noise.is_stochastic) return static_cast<std::uint32_t>(Rule::quantize(value, group, noise_of(words, i)));
  }
  return static_cast<std::uint32_t>(Rule::quantize(value, group));
}

// The words for the eight values from `position` of group `group`, counted from the tensor's first.
template <int kGroupSize>
__device__ inline PhiloxWords words_of(const KernelNoise& noise, std::int64_t group, int position) {
  if (!noise.is_stochastic) return {};
  return noise.key.words(static_cast<std::uint64_t>(group * (kGroupSize / kNoisePerCall) + position / kNoisePerCall));
}

template <class Rule>
__device__ inline void store_scale(const RunLayout& run, std::int64_t index, const GroupCode& group,
                                   unsigned char* wire) {
  store_bf16(wire + index * 2, group.scale);
  if constexpr (!Rule::kIsSymmetric) store_bf16(wire + run.zeros_offset + index * 2, group.zero);
}

// `values`: the lane's part of a full group.
template <class Rule, int kGroupSize>
__device__ inline void encode_full(const RunLayout& run, std::int64_t index, const float (&values)[kPerLane], int lane,
                                   const KernelNoise& noise, unsigned char* wire, unsigned char* codes) {
  constexpr int kLanes = kGroupSize / kPerLane;
  Extent extent;
  for (int i = 0; i < kPerLane; ++i) include<Rule>(extent, values[i]);
  const GroupCode group = group_of_lanes<Rule, kLanes>(extent, noise.is_stochastic);
  if (lane == 0) store_scale<Rule>(run, index, group, wire);
  const PhiloxWords words = words_of<kGroupSize>(noise, run.group_begin + index, lane * kPerLane);
  constexpr std::uint32_t kMask = (1u << Rule::kCodeBits) - 1;
  Vec8 packed = {};
  for (int i = 0; i < kPerLane; ++i) {
    packed.word[i / 4] |= (code_of<Rule>(values[i], group, noise, words, i) & kMask) << (i % 4 * 8);
  }
  if constexpr (Rule::kCodeBits == 8) {
    store_codes(codes + lane * kPerLane, packed);
  } else {
    // The upper half of the lanes holds the high halves of the lower lanes' bytes.
    for (int i = 0; i < 2; ++i) {
      packed.word[i] |= __shfl_xor_sync(lane_mask<kLanes>(), packed.word[i], kLanes / 2) << 4;
    }
    if (lane < kLanes / 2) store_codes(codes + lane * kPerLane, packed);
  }
}

// The last group of a row: never transformed, fewer than kGroupSize values.
template <typename T, class Rule, int kGroupSize, bool kHasSpikes>
__device__ inline void encode_part(const RunLayout& run, std::int64_t index, const T* x, int count, int lane,
                                   const KernelNoise& noise, unsigned char* wire, unsigned char* codes) {
  constexpr int kLanes = kGroupSize / kPerLane;
  Spikes spikes;
  if constexpr (kHasSpikes) {
    const auto visit = [&](const auto& fn) {
      for (int i = lane; i < count; i += kLanes) fn(i, to_float(x[i]));
    };
    spikes = take_spikes<kLanes>(run, index, visit, wire);
  }
  const auto value = [&](int i) { return kHasSpikes ? spikes.at(i, to_float(x[i])) : to_float(x[i]); };
  Extent extent;
  for (int i = lane; i < count; i += kLanes) include<Rule>(extent, value(i));
  const GroupCode group = group_of_lanes<Rule, kLanes>(extent, noise.is_stochastic);
  if (lane == 0) store_scale<Rule>(run, index, group, wire);
  const auto code = [&](int i) {
    const PhiloxWords words = words_of<kGroupSize>(noise, run.group_begin + index, i);
    return code_of<Rule>(value(i), group, noise, words, i % kNoisePerCall);
  };
  if constexpr (Rule::kCodeBits == 8) {
    for (int i = lane; i < count; i += kLanes) codes[i] = static_cast<unsigned char>(code(i) & 0xffu);
  } else {
    const int half = (count + 1) / 2;
    for (int j = lane; j < half; j += kLanes) {
      const std::uint32_t high = half + j < count ? code(half + j) & 15u : 0;
      codes[j] = static_cast<unsigned char>((code(j) & 15u) | high << 4);
    }
  }
}

template <typename T, class Rule, int kGroupSize, int kUnitSize, bool kHasSpikes>
__global__ void encode_kernel(RunLayout run, KernelNoise noise, const T* src, unsigned char* wire) {
  clear_padding(run, wire);
  if constexpr (kHasSpikes) clear_spike_padding(run, wire);
  const auto team = this_team<kGroupSize, kUnitSize>();
  const std::int64_t num_units = team.num_units(run);
  for (std::int64_t unit = team.first; unit < num_units; unit += team.step) {
    const std::int64_t index = team.group_index(run, unit);
    if (index < 0) continue;
    const Group group = run.group(index);
    const T* x = src + group.element;
    const int lane = team.group_lane();
    if (group.num_values != kGroupSize) {
      encode_part<T, Rule, kGroupSize, kHasSpikes>(run, index, x, group.num_values, lane, noise, wire,
                                                   wire + group.code);
      continue;
    }
    float values[kPerLane];
    load_values(x + lane * kPerLane, values);
    if constexpr (kHasSpikes) {
      const auto visit = [&](const auto& fn) {
        for (int i = 0; i < kPerLane; ++i) fn(lane * kPerLane + i, values[i]);
      };
      const Spikes spikes = take_spikes<kGroupSize / kPerLane>(run, index, visit, wire);
      for (int i = 0; i < kPerLane; ++i) values[i] = spikes.at(lane * kPerLane + i, values[i]);
    } else if constexpr (kUnitSize == kTransformWidth) {
      if (group.is_transformed) {
        multiply_by_factors(values, team.lane, kTransformScale);
        butterflies_of_lanes(values, team.lane);
      }
    }
    encode_full<Rule, kGroupSize>(run, index, values, lane, noise, wire, wire + group.code);
  }
}

}  // namespace pipecomm
