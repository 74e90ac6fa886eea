// What the codec's kernels are made of: teams of lanes, their loads and stores, their shuffles. Device code only, so
// that tests/simt can run this same source on the host.
// A team of neighbouring lanes codes a unit, kPerLane neighbouring values each: a group, or a transform block of two
// groups. Teams stride over the run's units.
#pragma once

#include <cstdint>

#include "codec/layout.h"
#include "codec/philox.h"
#include "codec/rules.h"

namespace pipecomm {

inline constexpr int kPerLane = 8;
inline constexpr int kBlockThreads = 256;
static_assert(kPerLane == kNoisePerCall);

// kPerLane values or codes as registers.
struct alignas(16) Vec16 {
  std::uint32_t word[4];
};
struct alignas(8) Vec8 {
  std::uint32_t word[2];
};

__device__ inline bool is_aligned(const void* at, std::uintptr_t alignment) {
  return reinterpret_cast<std::uintptr_t>(at) % alignment == 0;
}

// Two bytes at any alignment.
__device__ inline void store_bf16(unsigned char* at, std::uint32_t bits) {
  at[0] = static_cast<unsigned char>(bits & 0xff);
  at[1] = static_cast<unsigned char>(bits >> 8);
}
__device__ inline float load_bf16(const unsigned char* at) {
  return to_float(Bf16{static_cast<std::uint16_t>(at[0] | at[1] << 8)});
}

// `x` and `values` at 16-byte alignment.
__device__ inline void load_aligned(const float* x, float (&values)[kPerLane]) {
  for (int half = 0; half < 2; ++half) {
    const Vec16 bits = reinterpret_cast<const Vec16*>(x)[half];
    for (int i = 0; i < 4; ++i) values[half * 4 + i] = bits_to_float(bits.word[i]);
  }
}
template <typename T>
__device__ inline void load_aligned(const T* x, float (&values)[kPerLane]) {
  const Vec16 bits = *reinterpret_cast<const Vec16*>(x);
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = to_float(T{static_cast<std::uint16_t>(bits.word[i] & 0xffffu)});
    values[2 * i + 1] = to_float(T{static_cast<std::uint16_t>(bits.word[i] >> 16)});
  }
}
template <typename T>
__device__ inline void load_values(const T* x, float (&values)[kPerLane]) {
  if (is_aligned(x, 16)) return load_aligned(x, values);
  for (int i = 0; i < kPerLane; ++i) values[i] = to_float(x[i]);
}

__device__ inline void store_aligned(float* x, const float (&values)[kPerLane]) {
  for (int half = 0; half < 2; ++half) {
    Vec16 bits;
    for (int i = 0; i < 4; ++i) bits.word[i] = float_to_bits(values[half * 4 + i]);
    reinterpret_cast<Vec16*>(x)[half] = bits;
  }
}
template <typename T>
__device__ inline void store_aligned(T* x, const T (&values)[kPerLane]) {
  Vec16 bits;
  for (int i = 0; i < 4; ++i) {
    bits.word[i] = static_cast<std::uint32_t>(values[2 * i].bits) | static_cast<std::uint32_t>(values[2 * i + 1].bits)
                                                                        << 16;
  }
  *reinterpret_cast<Vec16*>(x) = bits;
}
template <typename T>
__device__ inline void store_values(T* x, const T (&values)[kPerLane]) {
  if (is_aligned(x, 16)) return store_aligned(x, values);
  for (int i = 0; i < kPerLane; ++i) x[i] = values[i];
}

// Eight bytes of codes.
__device__ inline void store_codes(unsigned char* at, const Vec8& codes) {
  if (is_aligned(at, 8)) {
    *reinterpret_cast<Vec8*>(at) = codes;
    return;
  }
  for (int i = 0; i < 8; ++i) at[i] = static_cast<unsigned char>(codes.word[i / 4] >> (i % 4 * 8) & 0xffu);
}
__device__ inline Vec8 load_codes(const unsigned char* at) {
  if (is_aligned(at, 8)) return *reinterpret_cast<const Vec8*>(at);
  Vec8 codes = {};
  for (int i = 0; i < 8; ++i) codes.word[i / 4] |= static_cast<std::uint32_t>(at[i]) << (i % 4 * 8);
  return codes;
}

// The kLanes lanes, starting at a multiple of kLanes, among which this lane is.
template <int kLanes>
__device__ inline unsigned lane_mask() {
  constexpr unsigned kTeam = kLanes == 32 ? 0xffffffffu : (1u << kLanes) - 1;
  return kTeam << (threadIdx.x % 32 / kLanes * kLanes);
}

template <int kLanes>
__device__ inline std::uint32_t max_of_lanes(std::uint32_t value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    const std::uint32_t other = __shfl_xor_sync(lane_mask<kLanes>(), value, offset);
    value = other > value ? other : value;
  }
  return value;
}

// A group's extremes as Rule::group takes them, collected value by value.
struct Extent {
  std::uint32_t low = UINT32_MAX;
  std::uint32_t high = 0;
};

template <class Rule>
__device__ inline void include(Extent& extent, float value) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t key = Rule::kIsSymmetric ? bits & ~kSignBit : order_key(bits);
  extent.low = key < extent.low ? key : extent.low;
  extent.high = key > extent.high ? key : extent.high;
}

// How to code the group whose values kLanes lanes have included.
template <class Rule, int kLanes>
__device__ inline GroupCode group_of_lanes(const Extent& extent, bool is_stochastic) {
  const std::uint32_t high = max_of_lanes<kLanes>(extent.high);
  if constexpr (Rule::kIsSymmetric) {
    return Rule::group(0, high, is_stochastic);
  } else {
    const std::uint32_t low = ~max_of_lanes<kLanes>(~extent.low);
    return Rule::group(key_bits(low), key_bits(high), is_stochastic);
  }
}

// The butterflies of a transform block held by eight lanes, in the order of hadamard.h.
__device__ inline void butterflies_of_lanes(float (&v)[kPerLane], int lane) {
  constexpr int kLanes = kTransformWidth / kPerLane;
  for (int distance = 1; distance < kPerLane; distance *= 2) {
    for (int i = 0; i < kPerLane; ++i) {
      if ((i & distance) != 0) continue;
      const float a = v[i];
      const float b = v[i + distance];
      v[i] = add(a, b);
      v[i + distance] = subtract(a, b);
    }
  }
  for (int distance = 1; distance < kLanes; distance *= 2) {
    for (int i = 0; i < kPerLane; ++i) {
      const float other = __shfl_xor_sync(lane_mask<kLanes>(), v[i], distance);
      v[i] = (lane & distance) != 0 ? subtract(other, v[i]) : add(v[i], other);
    }
  }
}

__device__ inline void multiply_by_factors(float (&v)[kPerLane], int lane, float factor) {
  for (int i = 0; i < kPerLane; ++i) v[i] = multiply(v[i], transform_factor(lane * kPerLane + i, factor));
}

// Where a lane stands: its team's units, and its places in the unit and in the unit's group.
template <int kGroupSize, int kUnitSize>
struct Team {
  static constexpr int kLanes = kUnitSize / kPerLane;
  static constexpr int kGroupLanes = kGroupSize / kPerLane;
  static constexpr int kGroups = kUnitSize / kGroupSize;

  std::int64_t first;
  std::int64_t step;
  int lane;

  __device__ int group_lane() const { return lane % kGroupLanes; }

  __device__ static std::int64_t num_units(const RunLayout& run) {
    if (kGroups == 1) return run.num_groups;
    return run.block_position(run.group_begin + run.num_groups, kUnitSize) -
           run.block_position(run.group_begin, kUnitSize);
  }

  // The lane's group of unit `unit`, counted from the run's first; -1 where the row has none.
  __device__ std::int64_t group_index(const RunLayout& run, std::int64_t unit) const {
    if (kGroups == 1) return unit;
    const std::int64_t blocks_per_row = (run.groups_per_row + kGroups - 1) / kGroups;
    const std::int64_t block = run.block_position(run.group_begin, kUnitSize) + unit;
    const std::int64_t in_row = block % blocks_per_row * kGroups + lane / kGroupLanes;
    if (in_row >= run.groups_per_row) return -1;
    return block / blocks_per_row * run.groups_per_row + in_row - run.group_begin;
  }
};

template <int kGroupSize, int kUnitSize>
__device__ inline Team<kGroupSize, kUnitSize> this_team() {
  constexpr int kLanes = kUnitSize / kPerLane;
  constexpr int kTeams = kBlockThreads / kLanes;
  const int thread = static_cast<int>(threadIdx.x);
  return {static_cast<std::int64_t>(blockIdx.x) * kTeams + thread / kLanes,
          static_cast<std::int64_t>(gridDim.x) * kTeams, thread % kLanes};
}

}  // namespace pipecomm
