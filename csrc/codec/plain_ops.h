// The operations on whole groups and transform blocks, in plain C++: what the compiler makes of them for the
// instruction set of the including file. An Isa inherits them and replaces those that it does better.
#pragma once

#include <type_traits>

#include "codec/hadamard.h"
#include "codec/scalar_groups.h"
#include "codec/walk.h"

namespace pipecomm {
namespace {

// Group sizes are multiples of this.
inline constexpr int kBlockSize = 32;

// For code that looks levels and bounds up.
inline constexpr SixteenFloats kNf4Bounds = nf4_bounds();

template <class Rule>
constexpr SixteenFloats make_levels() {
  if constexpr (std::is_same_v<Rule, Nf4Rule>) return nf4_levels();
  SixteenFloats levels{};
  for (std::uint32_t code = 0; code < 16; ++code) levels.at[code] = Rule::level(code);
  return levels;
}
template <class Rule>
inline constexpr SixteenFloats kLevels = make_levels<Rule>();

struct PlainOps {
  template <int kCount, typename T>
  static std::uint32_t max_magnitude(const std::byte* x, T) {
    return Scalar<T>::max_magnitude(x, kCount);
  }
  template <int kCount, typename T>
  static std::uint32_t min_magnitude(const std::byte* x, T) {
    return Scalar<T>::min_magnitude(x, kCount);
  }
  // The first value whose magnitude has these bits; there is one.
  template <int kCount, typename T>
  static int place_of(const std::byte* x, T, std::uint32_t magnitude) {
    return Scalar<T>::place_of(x, magnitude);
  }
  template <typename T>
  static Extremes extremes(const std::byte* x, T) {
    return Scalar<T>::extremes(x, kBlockSize);
  }
  // Of the groups at `a` and `b`.
  template <class Isa, typename T>
  static void extremes_of_two(const std::byte* a, const std::byte* b, T value, std::uint32_t* low,
                              std::uint32_t* high) {
    const Extremes found[2] = {Isa::extremes(a, value), Isa::extremes(b, value)};
    for (int i = 0; i < 2; ++i) {
      low[i] = found[i].low;
      high[i] = found[i].high;
    }
  }
  template <int kCount, class Rule, typename T>
  static void quantize(Rule, const std::byte* x, T, const GroupCode& group, std::byte* codes) {
    Scalar<T>::template quantize<Rule>(x, kCount, group, codes);
  }
  // No decoded value is out of T's range.
  template <int kCount, class Rule, typename T>
  static void dequantize(Rule, const std::byte* codes, float scale, float zero, std::byte* x, T) {
    Scalar<T>::template dequantize<Rule, false>(codes, kCount, scale, zero, x);
  }

  // kBlockSize values.
  template <typename T>
  static void to_floats(const std::byte* x, T, float* out) {
    for (int i = 0; i < kBlockSize; ++i) out[i] = read_float<T>(x, i);
  }
  // kBlockSize finite values or infinities, held within T's finite ones.
  template <typename T>
  static void from_floats(const float* in, std::byte* x, T) {
    for (int i = 0; i < kBlockSize; ++i) write_decoded<T>(x, i, in[i], 0.0f, 0.0f);
  }

  // kTransformWidth values.
  template <typename T>
  static void transform(const std::byte* x, T, float* out) {
    for (int i = 0; i < kTransformWidth; ++i) out[i] = multiply(read_float<T>(x, i), kEncodeFactors.at[i]);
    butterflies(out);
  }
  // A full batch of groups of kBlockSize, in blocks one after the other. Also order keys of each group's smallest and
  // largest value, one of which is that of a NaN where the block is not finite.
  template <class Isa, typename T>
  static void transform_and_scan(const std::byte* x, T value, float* out, std::uint32_t* low, std::uint32_t* high) {
    for (std::size_t g = 0; g < kBatchSize; g += 2) {
      Isa::transform(x + g * kBlockSize * sizeof(T), value, out + g * kBlockSize);
    }
    for (std::size_t g = 0; g < kBatchSize; ++g) {
      const Extremes found = Isa::extremes(reinterpret_cast<const std::byte*>(out + g * kBlockSize), 0.0f);
      low[g] = found.low;
      high[g] = found.high;
    }
  }
  // Destroys `in`; its values are finite.
  template <typename T>
  static void transform_back(float* in, std::byte* x, T) {
    butterflies(in);
    for (int i = 0; i < kTransformWidth; ++i) {
      // The sum makes +0 of -0.
      write_decoded<T>(x, i, add(multiply(in[i], kDecodeFactors.at[i]), 0.0f), 0.0f, 0.0f);
    }
  }
};

}  // namespace
}  // namespace pipecomm
