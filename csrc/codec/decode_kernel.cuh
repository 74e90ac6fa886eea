// The decode kernel of every codec: one pass, a lane keeps its values in registers.
#pragma once

#include <type_traits>

#include "codec/spikes.cuh"

namespace pipecomm {

// What a code stands for: computed, or looked up where each lane wants a different one of 16 numbers.
template <class Rule>
struct Levels {
  __device__ explicit Levels(const float*) {}
  __device__ float operator[](std::uint32_t code) const { return Rule::level(code); }
};
template <>
struct Levels<Nf4Rule> {
  const float* table;

  __device__ explicit Levels(const float* shared) : table(shared) {}
  __device__ float operator[](std::uint32_t code) const { return table[code & 15u]; }
};

// The lane's eight codes of a full group.
template <class Rule, int kLanes>
__device__ inline void load_levels(const unsigned char* codes, int lane, const Levels<Rule>& levels,
                                   float (&values)[kPerLane]) {
  // With 4 bits, the upper half of the lanes reads the high halves of the lower lanes' bytes.
  constexpr bool kIsPacked = Rule::kCodeBits == 4;
  const Vec8 packed = load_codes(codes + (kIsPacked ? lane % (kLanes / 2) : lane) * kPerLane);
  const int shift = kIsPacked && lane >= kLanes / 2 ? 4 : 0;
  constexpr std::uint32_t kMask = (1u << Rule::kCodeBits) - 1;
  for (int i = 0; i < kPerLane; ++i) values[i] = levels[packed.word[i / 4] >> (i % 4 * 8 + shift) & kMask];
}

// What Levels looks up. Unrolled, the levels are constants.
template <class Rule>
__device__ inline void fill_table(float (&table)[16]) {
  for (unsigned code = 0; code < 16; ++code) {
    if (threadIdx.x == code) table[code] = Rule::level(code);
  }
  __syncthreads();
}

// A group that its row's end cuts short: one value after the other, the spikes by the lanes that wrote there before.
template <typename T, class Rule, int kLanes, bool kHasSpikes>
__device__ inline void decode_part(const RunLayout& run, const unsigned char* wire, std::int64_t index,
                                   const Group& group, int lane, const Levels<Rule>& levels, float scale, float zero,
                                   T* x) {
  const unsigned char* codes = wire + group.code;
  const int count = group.num_values;
  const int half = (count + 1) / 2;
  for (int i = lane; i < count; i += kLanes) {
    std::uint32_t code = codes[Rule::kCodeBits == 8 || i < half ? i : i - half];
    if (Rule::kCodeBits == 4) code = i < half ? code & 15u : code >> 4;
    x[i] = finish_decode<T>(dequantize<Rule>(levels[code], scale, zero), scale, zero);
  }
  if constexpr (kHasSpikes) {
    for_each_spike<T>(run, index, wire, [&](int i, T value) {
      if (i < count && i % kLanes == lane) x[i] = value;
    });
  }
}

// Decodes the lane's part of a transform block; the block is NaN where one of its groups is.
template <class Rule>
__device__ inline void transform_back(float (&values)[kPerLane], int lane, float& scale, float& zero) {
  const bool is_finite = is_finite_bits(float_to_bits(scale)) && is_finite_bits(float_to_bits(zero));
  const bool is_spoilt = max_of_lanes<kTransformWidth / kPerLane>(is_finite ? 0 : 1) != 0;
  for (int i = 0; i < kPerLane; ++i) {
    values[i] = dequantize<Rule>(values[i], multiply(scale, kGuard), multiply(zero, kGuard));
  }
  butterflies_of_lanes(values, lane);
  multiply_by_factors(values, lane, 1.0f / kGuard);
  // Makes +0 of -0.
  for (int i = 0; i < kPerLane; ++i) values[i] = add(values[i], 0.0f);
  scale = is_spoilt ? bits_to_float(kInfinityBits) : 0.0f;
  zero = 0.0f;
}

template <typename T, class Rule, int kGroupSize, int kUnitSize, bool kHasSpikes>
__global__ void decode_kernel(RunLayout run, const unsigned char* wire, T* dst) {
  constexpr int kLanes = kGroupSize / kPerLane;
  __shared__ float table[16];
  if constexpr (std::is_same_v<Rule, Nf4Rule>) fill_table<Rule>(table);
  const Levels<Rule> levels(table);
  const auto team = this_team<kGroupSize, kUnitSize>();
  const std::int64_t num_units = team.num_units(run);
  for (std::int64_t unit = team.first; unit < num_units; unit += team.step) {
    const std::int64_t index = team.group_index(run, unit);
    if (index < 0) continue;
    const Group group = run.group(index);
    T* x = dst + group.element;
    const int lane = team.group_lane();
    float scale = load_bf16(wire + index * 2);
    float zero = Rule::kIsSymmetric ? 0.0f : load_bf16(wire + run.zeros_offset + index * 2);
    if (group.num_values != kGroupSize) {
      decode_part<T, Rule, kLanes, kHasSpikes>(run, wire, index, group, lane, levels, scale, zero, x);
      continue;
    }
    float values[kPerLane];
    load_levels<Rule, kLanes>(wire + group.code, lane, levels, values);
    if (!kHasSpikes && kUnitSize == kTransformWidth && group.is_transformed) {
      transform_back<Rule>(values, team.lane, scale, zero);
    } else {
      for (int i = 0; i < kPerLane; ++i) values[i] = dequantize<Rule>(values[i], scale, zero);
    }
    T decoded[kPerLane];
    for (int i = 0; i < kPerLane; ++i) decoded[i] = finish_decode<T>(values[i], scale, zero);
    if constexpr (kHasSpikes) {
      for_each_spike<T>(run, index, wire, [&](int spike, T value) {
        for (int i = 0; i < kPerLane; ++i) decoded[i] = spike == lane * kPerLane + i ? value : decoded[i];
      });
    }
    store_values(x + lane * kPerLane, decoded);
  }
}

}  // namespace pipecomm
