// One group of any length, one value at a time: the tails of rows, groups at the limits of the dtype, and every group
// where there is no SIMD. Local to the including file for the reason given in host_loops.h.
#pragma once

#include <cstddef>

#include "codec/rules.h"

namespace pipecomm {
namespace {

template <typename T>
T read(const std::byte* at) {
  T value;
  __builtin_memcpy(&value, at, sizeof(T));
  return value;
}

template <typename T>
void write(std::byte* at, T value) {
  __builtin_memcpy(at, &value, sizeof(T));
}

template <typename T>
float read_float(const std::byte* values, int index) {
  return to_float(read<T>(values + static_cast<std::size_t>(index) * sizeof(T)));
}

template <typename T>
void write_decoded(std::byte* values, int index, float value, float scale, float zero) {
  write(values + static_cast<std::size_t>(index) * sizeof(T), finish_decode<T>(value, scale, zero));
}

template <typename T>
struct BitsOf {
  using type = std::uint16_t;
};
template <>
struct BitsOf<float> {
  using type = std::uint32_t;
};

// Bits of T as bits of a float32, without a branch.
template <typename T>
std::uint32_t widen(std::uint32_t bits);
template <>
inline std::uint32_t widen<float>(std::uint32_t bits) {
  return bits;
}
template <>
inline std::uint32_t widen<Bf16>(std::uint32_t bits) {
  return bits << 16;
}
template <>
inline std::uint32_t widen<Fp16>(std::uint32_t bits) {
  const std::uint32_t magnitude = (bits & 0x7fffu) << 13;
  const std::uint32_t finite = float_to_bits(multiply(bits_to_float(magnitude), 5.192296858534828e33f));  // 2^112
  return (bits & 0x8000u) << 16 | (magnitude < 0x0f800000u ? finite : magnitude | kInfinityBits);
}

// A group's smallest and largest value, as order keys of T's own bits.
struct Extremes {
  std::uint32_t low;
  std::uint32_t high;
};

// Groups of any length up to group_size, one value at a time.
template <typename T>
struct Scalar {
  using Bits = typename BitsOf<T>::type;

  static constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;

  static Bits bits_at(const std::byte* x, int i) { return read<Bits>(x + static_cast<std::size_t>(i) * sizeof(T)); }

  // Of T's own bits.
  static std::uint32_t max_magnitude(const std::byte* x, int count) {
    Bits largest = 0;
    for (int i = 0; i < count; ++i) {
      const Bits bits = static_cast<Bits>(bits_at(x, i) & kMagnitude);
      largest = bits > largest ? bits : largest;
    }
    return largest;
  }

  static Extremes extremes(const std::byte* x, int count) {
    Bits low = static_cast<Bits>(~Bits{0});
    Bits high = 0;
    for (int i = 0; i < count; ++i) {
      const Bits key = order_key(bits_at(x, i));
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
    return {low, high};
  }

  // The first value whose magnitude has these bits; there is one.
  static int place_of(const std::byte* x, std::uint32_t magnitude) {
    int i = 0;
    while ((bits_at(x, i) & kMagnitude) != magnitude) ++i;
    return i;
  }

  static std::uint32_t min_magnitude(const std::byte* x, int count) {
    Bits smallest = kMagnitude;
    for (int i = 0; i < count; ++i) {
      const Bits bits = static_cast<Bits>(bits_at(x, i) & kMagnitude);
      smallest = bits < smallest ? bits : smallest;
    }
    return smallest;
  }

  template <class Rule>
  static void quantize(const std::byte* x, int count, const GroupCode& group, std::byte* codes) {
    store_codes<Rule::kCodeBits>(count, codes, [&](int i) { return Rule::quantize(read_float<T>(x, i), group); });
  }

  // Stochastic rounding; `noise` of each value. Codes first, in a loop that vectorizes, then their packing.
  template <class Rule>
  static void quantize(const std::byte* x, int count, const GroupCode& group, const float* noise, std::byte* codes) {
    constexpr int kMaxCount = 128;
    std::int8_t found[kMaxCount];
    for (int i = 0; i < count; ++i) {
      found[i] = static_cast<std::int8_t>(Rule::quantize(read_float<T>(x, i), group, noise[i]));
    }
    store_codes<Rule::kCodeBits>(count, codes, [&](int i) { return static_cast<int>(found[i]); });
  }

  // kIsLimited: values may be out of T's range, or the scale not finite.
  template <class Rule, bool kIsLimited = true>
  static void dequantize(const std::byte* codes, int count, float scale, float zero, std::byte* x) {
    const int half = (count + 1) / 2;
    for (int i = 0; i < count; ++i) {
      std::uint32_t code;
      if constexpr (Rule::kCodeBits == 8) {
        code = static_cast<std::uint32_t>(codes[i]);
      } else {
        const auto byte = static_cast<std::uint32_t>(codes[i < half ? i : i - half]);
        code = i < half ? byte & 15u : byte >> 4;
      }
      const float value = pipecomm::dequantize<Rule>(Rule::level(code), scale, zero);
      if constexpr (kIsLimited) {
        write_decoded<T>(x, i, value, scale, zero);
      } else {
        write(x + static_cast<std::size_t>(i) * sizeof(T), from_float<T>(value));
      }
    }
  }

  // With 4 bits byte j holds value j in its low half and value j + ceil(count / 2) in its high half.
  template <int kCodeBits, typename Fn>
  static void store_codes(int count, std::byte* codes, const Fn& code) {
    if constexpr (kCodeBits == 8) {
      for (int i = 0; i < count; ++i) codes[i] = static_cast<std::byte>(code(i));
    } else {
      const int half = count / 2;
      const int rounded = (count + 1) / 2;
      for (int j = 0; j < half; ++j) codes[j] = static_cast<std::byte>((code(j) & 15) | code(rounded + j) << 4);
      if (half < rounded) codes[half] = static_cast<std::byte>(code(half) & 15);
    }
  }
};

}  // namespace
}  // namespace pipecomm
