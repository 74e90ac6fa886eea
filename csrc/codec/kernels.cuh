// The codec's kernels: device code only, so that tests/simt can run this same source on the host.
// A team of neighbouring lanes codes a group, kPerLane values each; teams stride over the run's groups.
#pragma once

#include <cstdint>

#include "codec/layout.h"
#include "codec/scalar_math.h"

namespace pipecomm {

inline constexpr int kPerLane = 8;
inline constexpr int kBlockThreads = 256;

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
__device__ inline void store_bf16(unsigned char* at, Bf16 value) {
  at[0] = static_cast<unsigned char>(value.bits & 0xff);
  at[1] = static_cast<unsigned char>(value.bits >> 8);
}
__device__ inline Bf16 load_bf16(const unsigned char* at) {
  return Bf16{static_cast<std::uint16_t>(at[0] | at[1] << 8)};
}

// `x` and `values` at 16-byte alignment.
__device__ inline void load_values(const float* x, float (&values)[kPerLane]) {
  for (int half = 0; half < 2; ++half) {
    const Vec16 bits = reinterpret_cast<const Vec16*>(x)[half];
    for (int i = 0; i < 4; ++i) values[half * 4 + i] = bits_to_float(bits.word[i]);
  }
}
template <typename T>
__device__ inline void load_values(const T* x, float (&values)[kPerLane]) {
  const Vec16 bits = *reinterpret_cast<const Vec16*>(x);
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = to_float(T{static_cast<std::uint16_t>(bits.word[i] & 0xffffu)});
    values[2 * i + 1] = to_float(T{static_cast<std::uint16_t>(bits.word[i] >> 16)});
  }
}

__device__ inline void store_values(float* x, const float (&values)[kPerLane]) {
  for (int half = 0; half < 2; ++half) {
    Vec16 bits;
    for (int i = 0; i < 4; ++i) bits.word[i] = float_to_bits(values[half * 4 + i]);
    reinterpret_cast<Vec16*>(x)[half] = bits;
  }
}
template <typename T>
__device__ inline void store_values(T* x, const T (&values)[kPerLane]) {
  Vec16 bits;
  for (int i = 0; i < 4; ++i) {
    bits.word[i] = static_cast<std::uint32_t>(values[2 * i].bits) | static_cast<std::uint32_t>(values[2 * i + 1].bits)
                                                                        << 16;
  }
  *reinterpret_cast<Vec16*>(x) = bits;
}

// The lanes that share this lane's group.
template <int kLanes>
__device__ inline unsigned team_mask() {
  constexpr unsigned kTeam = kLanes == 32 ? 0xffffffffu : (1u << kLanes) - 1;
  return kTeam << (threadIdx.x % 32 / kLanes * kLanes);
}

template <int kLanes>
__device__ inline std::uint32_t team_max(std::uint32_t value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    const std::uint32_t other = __shfl_xor_sync(team_mask<kLanes>(), value, offset);
    value = other > value ? other : value;
  }
  return value;
}

struct KeyRange {
  std::uint32_t low = UINT32_MAX;
  std::uint32_t high = 0;
};

__device__ inline void include(KeyRange& range, float value) {
  const std::uint32_t key = order_key(float_to_bits(value));
  range.low = key < range.low ? key : range.low;
  range.high = key > range.high ? key : range.high;
}

template <int kLanes>
__device__ inline KeyRange team_range(KeyRange range) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    const std::uint32_t low = __shfl_xor_sync(team_mask<kLanes>(), range.low, offset);
    const std::uint32_t high = __shfl_xor_sync(team_mask<kLanes>(), range.high, offset);
    range.low = low < range.low ? low : range.low;
    range.high = high > range.high ? high : range.high;
  }
  return range;
}

// Where a lane stands: its team's first group, the step to the next, and its place in the team.
template <int kLanes>
struct Team {
  std::int64_t first;
  std::int64_t step;
  int lane;
};

template <int kLanes>
__device__ inline Team<kLanes> this_team() {
  constexpr int kTeams = kBlockThreads / kLanes;
  const int thread = static_cast<int>(threadIdx.x);
  return {static_cast<std::int64_t>(blockIdx.x) * kTeams + thread / kLanes,
          static_cast<std::int64_t>(gridDim.x) * kTeams, thread % kLanes};
}

// Zeros between the sections, by the first block.
__device__ inline void clear_padding(const RunLayout& run, unsigned char* wire) {
  if (blockIdx.x != 0) return;
  const std::int64_t used = run.num_groups * 2;
  const auto thread = static_cast<std::int64_t>(threadIdx.x);
  if (used + thread >= run.zeros_offset) return;
  wire[used + thread] = 0;
  if (run.has_zeros) wire[run.zeros_offset + used + thread] = 0;
}

__device__ inline std::uint32_t magnitude_bits(float value) { return float_to_bits(value) & ~kSignBit; }

// A group of any length and alignment.
template <typename T, int kLanes>
__device__ void encode_int8_slowly(const T* x, int count, int lane, unsigned char* scale, unsigned char* codes) {
  std::uint32_t largest = 0;
  for (int i = lane; i < count; i += kLanes) {
    const std::uint32_t bits = magnitude_bits(to_float(x[i]));
    largest = bits > largest ? bits : largest;
  }
  const Int8Group group = int8_group(team_max<kLanes>(largest));
  if (lane == 0) store_bf16(scale, group.scale);
  for (int i = lane; i < count; i += kLanes) {
    const std::int32_t code = group.is_finite() ? quantize_int8(to_float(x[i]), group.inverse) : 0;
    codes[i] = static_cast<unsigned char>(code & 0xff);
  }
}

template <typename T, int kLanes>
__device__ void encode_int8_group(const T* x, int lane, unsigned char* scale, unsigned char* codes) {
  float values[kPerLane];
  load_values(x + lane * kPerLane, values);
  std::uint32_t largest = 0;
  for (int i = 0; i < kPerLane; ++i) {
    const std::uint32_t bits = magnitude_bits(values[i]);
    largest = bits > largest ? bits : largest;
  }
  const Int8Group group = int8_group(team_max<kLanes>(largest));
  if (lane == 0) store_bf16(scale, group.scale);
  Vec8 packed = {};
  for (int i = 0; i < kPerLane; ++i) {
    const auto code = static_cast<std::uint32_t>(group.is_finite() ? quantize_int8(values[i], group.inverse) : 0);
    packed.word[i / 4] |= (code & 0xffu) << (i % 4 * 8);
  }
  reinterpret_cast<Vec8*>(codes)[lane] = packed;
}

template <typename T, int kGroupSize>
__global__ void encode_int8_kernel(RunLayout run, const T* src, unsigned char* wire) {
  constexpr int kLanes = kGroupSize / kPerLane;
  clear_padding(run, wire);
  const Team<kLanes> team = this_team<kLanes>();
  for (std::int64_t index = team.first; index < run.num_groups; index += team.step) {
    const GroupPlace place = run.place(index);
    const T* x = src + place.element;
    unsigned char* codes = wire + place.code;
    if (place.num_values == kGroupSize && is_aligned(x, 16) && is_aligned(codes, 8)) {
      encode_int8_group<T, kLanes>(x, team.lane, wire + index * 2, codes);
    } else {
      encode_int8_slowly<T, kLanes>(x, place.num_values, team.lane, wire + index * 2, codes);
    }
  }
}

template <typename T, int kGroupSize>
__global__ void decode_int8_kernel(RunLayout run, const unsigned char* wire, T* dst) {
  constexpr int kLanes = kGroupSize / kPerLane;
  const Team<kLanes> team = this_team<kLanes>();
  for (std::int64_t index = team.first; index < run.num_groups; index += team.step) {
    const GroupPlace place = run.place(index);
    T* x = dst + place.element;
    const unsigned char* codes = wire + place.code;
    const float scale = to_float(load_bf16(wire + index * 2));
    const auto value = [&](std::uint32_t code) {
      return finish_decode<T>(dequantize_int8(static_cast<std::int8_t>(code & 0xffu), scale), scale, 0.0f);
    };
    if (place.num_values == kGroupSize && is_aligned(x, 16) && is_aligned(codes, 8)) {
      const Vec8 packed = reinterpret_cast<const Vec8*>(codes)[team.lane];
      T values[kPerLane];
      for (int i = 0; i < kPerLane; ++i) values[i] = value(packed.word[i / 4] >> (i % 4 * 8));
      store_values(x + team.lane * kPerLane, values);
    } else {
      for (int i = team.lane; i < place.num_values; i += kLanes) x[i] = value(codes[i]);
    }
  }
}

inline constexpr int kInt4GroupSize = 32;
inline constexpr int kInt4Lanes = kInt4GroupSize / kPerLane;

template <typename T>
__device__ inline std::uint32_t int4_code(const Int4Group& group, T value) {
  if (!group.is_finite()) return 0;
  return static_cast<std::uint32_t>(quantize_int4(to_float(value), group.half_zero, group.inverse));
}

template <typename T>
__device__ void encode_int4_slowly(const T* x, int count, int lane, unsigned char* scale, unsigned char* zero,
                                   unsigned char* codes) {
  KeyRange range;
  for (int i = lane; i < count; i += kInt4Lanes) include(range, to_float(x[i]));
  range = team_range<kInt4Lanes>(range);
  const Int4Group group = int4_group(key_bits(range.low), key_bits(range.high));
  if (lane == 0) {
    store_bf16(scale, group.scale);
    store_bf16(zero, group.zero);
  }
  const int half = (count + 1) / 2;
  for (int j = lane; j < half; j += kInt4Lanes) {
    std::uint32_t code = int4_code(group, x[j]);
    if (half + j < count) code |= int4_code(group, x[half + j]) << 4;
    codes[j] = static_cast<unsigned char>(code);
  }
}

template <typename T>
__device__ void encode_int4_group(const T* x, int lane, unsigned char* scale, unsigned char* zero,
                                  unsigned char* codes) {
  float values[kPerLane];
  load_values(x + lane * kPerLane, values);
  KeyRange range;
  for (int i = 0; i < kPerLane; ++i) include(range, values[i]);
  range = team_range<kInt4Lanes>(range);
  const Int4Group group = int4_group(key_bits(range.low), key_bits(range.high));
  if (lane == 0) {
    store_bf16(scale, group.scale);
    store_bf16(zero, group.zero);
  }
  Vec8 packed = {};
  for (int i = 0; i < kPerLane; ++i) packed.word[i / 4] |= int4_code(group, values[i]) << (i % 4 * 8);
  // The upper half of the lanes holds the high halves of the lower lanes' bytes.
  for (int i = 0; i < 2; ++i) {
    packed.word[i] |= __shfl_xor_sync(team_mask<kInt4Lanes>(), packed.word[i], kInt4Lanes / 2) << 4;
  }
  if (lane < kInt4Lanes / 2) reinterpret_cast<Vec8*>(codes)[lane] = packed;
}

template <typename T>
__global__ void encode_int4_kernel(RunLayout run, const T* src, unsigned char* wire) {
  clear_padding(run, wire);
  const Team<kInt4Lanes> team = this_team<kInt4Lanes>();
  for (std::int64_t index = team.first; index < run.num_groups; index += team.step) {
    const GroupPlace place = run.place(index);
    const T* x = src + place.element;
    unsigned char* scale = wire + index * 2;
    unsigned char* codes = wire + place.code;
    if (place.num_values == kInt4GroupSize && is_aligned(x, 16) && is_aligned(codes, 8)) {
      encode_int4_group(x, team.lane, scale, scale + run.zeros_offset, codes);
    } else {
      encode_int4_slowly(x, place.num_values, team.lane, scale, scale + run.zeros_offset, codes);
    }
  }
}

template <typename T>
__global__ void decode_int4_kernel(RunLayout run, const unsigned char* wire, T* dst) {
  const Team<kInt4Lanes> team = this_team<kInt4Lanes>();
  for (std::int64_t index = team.first; index < run.num_groups; index += team.step) {
    const GroupPlace place = run.place(index);
    T* x = dst + place.element;
    const unsigned char* codes = wire + place.code;
    const float scale = to_float(load_bf16(wire + index * 2));
    const float zero = to_float(load_bf16(wire + run.zeros_offset + index * 2));
    const auto value = [&](std::uint32_t code) {
      return finish_decode<T>(dequantize_int4(static_cast<std::int32_t>(code & 15u), scale, zero), scale, zero);
    };
    if (place.num_values == kInt4GroupSize && is_aligned(x, 16) && is_aligned(codes, 8)) {
      const Vec8 packed = reinterpret_cast<const Vec8*>(codes)[team.lane % (kInt4Lanes / 2)];
      const int shift = team.lane < kInt4Lanes / 2 ? 0 : 4;
      T values[kPerLane];
      for (int i = 0; i < kPerLane; ++i) values[i] = value(packed.word[i / 4] >> (i % 4 * 8 + shift));
      store_values(x + team.lane * kPerLane, values);
    } else {
      const int half = (place.num_values + 1) / 2;
      for (int i = team.lane; i < place.num_values; i += kInt4Lanes) {
        x[i] = i < half ? value(codes[i]) : value(static_cast<std::uint32_t>(codes[i - half]) >> 4);
      }
    }
  }
}

}  // namespace pipecomm
