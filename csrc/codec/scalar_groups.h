// One group of any length, one value at a time: the tails of rows, groups at the limits of the dtype, and every group
// where there is no SIMD. Local to the including file for the reason given in host_loops.h.
#pragma once

#include <cstddef>

#include "codec/scalar_math.h"

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

// Order keys of a group's smallest and largest value.
struct Extremes {
  std::int32_t low;
  std::int32_t high;
};

// Groups of any length up to group_size, one value at a time.
template <typename T>
struct Scalar {
  static std::uint32_t max_magnitude(const std::byte* x, int count) {
    std::uint32_t largest = 0;
    for (int i = 0; i < count; ++i) {
      const std::uint32_t bits = float_to_bits(read_float<T>(x, i)) & ~kSignBit;
      largest = bits > largest ? bits : largest;
    }
    return largest;
  }

  static Extremes extremes(const std::byte* x, int count) {
    Extremes found = {INT32_MAX, INT32_MIN};
    for (int i = 0; i < count; ++i) {
      const std::int32_t key = order_key(float_to_bits(read_float<T>(x, i)));
      found.low = key < found.low ? key : found.low;
      found.high = key > found.high ? key : found.high;
    }
    return found;
  }

  static void quantize_int8(const std::byte* x, int count, float inverse, std::byte* codes) {
    for (int i = 0; i < count; ++i) {
      codes[i] = static_cast<std::byte>(pipecomm::quantize_int8(read_float<T>(x, i), inverse));
    }
  }

  // Byte j holds value j in its low half and value j + ceil(count / 2) in its high half.
  static void quantize_int4(const std::byte* x, int count, float half_zero, float inverse, std::byte* codes) {
    const int half = (count + 1) / 2;
    for (int j = 0; j < half; ++j) {
      int code = pipecomm::quantize_int4(read_float<T>(x, j), half_zero, inverse);
      if (half + j < count) {
        code |= pipecomm::quantize_int4(read_float<T>(x, half + j), half_zero, inverse) << 4;
      }
      codes[j] = static_cast<std::byte>(code);
    }
  }

  static void dequantize_int8(const std::byte* codes, int count, float scale, std::byte* x) {
    for (int i = 0; i < count; ++i) {
      const int code = static_cast<std::int8_t>(codes[i]);
      write_decoded<T>(x, i, pipecomm::dequantize_int8(code, scale), scale, 0.0f);
    }
  }

  static void dequantize_int4(const std::byte* codes, int count, float scale, float zero, std::byte* x) {
    const int half = (count + 1) / 2;
    for (int i = 0; i < count; ++i) {
      const int byte = static_cast<int>(codes[i < half ? i : i - half]);
      write_decoded<T>(x, i, pipecomm::dequantize_int4(i < half ? byte & 15 : byte >> 4, scale, zero), scale, zero);
    }
  }
};

}  // namespace
}  // namespace pipecomm
