// The loops over groups, once for all instruction sets. An Isa gives the operations on whole groups; scalar code, the
// same for every Isa, does what is left.
// Include inside the region of #pragma GCC target and after every other header: all names here are local to the file
// that includes it, so that no other file can pick up a copy compiled for an instruction set it must not use.
#pragma once

#include "codec/host.h"
#include "codec/scalar_groups.h"
#include "codec/scalar_math.h"

namespace pipecomm {
namespace {

// Group sizes are multiples of this, the number of values an Isa's operation takes.
inline constexpr int kBlockSize = 32;

// Where one group's bytes lie on the wire. Byte is std::byte or const std::byte.
template <typename Byte>
struct WirePlace {
  Byte* scale;
  Byte* zero;
  Byte* codes;
};

template <class Isa, typename T, int kGroupSize>
struct Int8Groups {
  static constexpr int kSize = kGroupSize;

  static void encode(const std::byte* x, int count, const WirePlace<std::byte>& wire) {
    const bool is_full = count == kSize;
    const Int8Group group =
        int8_group(is_full ? Isa::template max_magnitude<kSize>(x, T{}) : Scalar<T>::max_magnitude(x, count));
    write(wire.scale, group.scale);
    if (!group.is_finite()) {
      __builtin_memset(wire.codes, 0, static_cast<std::size_t>(count));
    } else if (is_full) {
      for (int i = 0; i < kSize; i += kBlockSize) {
        Isa::quantize_int8(x + static_cast<std::size_t>(i) * sizeof(T), T{}, group.inverse, wire.codes + i);
      }
    } else {
      Scalar<T>::quantize_int8(x, count, group.inverse, wire.codes);
    }
  }

  static void decode(const WirePlace<const std::byte>& wire, int count, std::byte* x) {
    const float scale = to_float(read<Bf16>(wire.scale));
    if (count != kSize || !decodes_in_range<T>(scale, 0.0f, kMaxInt8Code + 1)) {
      Scalar<T>::dequantize_int8(wire.codes, count, scale, x);
      return;
    }
    for (int i = 0; i < kSize; i += kBlockSize) {
      Isa::dequantize_int8(wire.codes + i, scale, x + static_cast<std::size_t>(i) * sizeof(T), T{});
    }
  }
};

template <class Isa, typename T>
struct Int4Groups {
  static constexpr int kSize = kBlockSize;

  static void encode(const std::byte* x, int count, const WirePlace<std::byte>& wire) {
    const bool is_full = count == kSize;
    const Extremes found = is_full ? Isa::extremes(x, T{}) : Scalar<T>::extremes(x, count);
    const Int4Group group = int4_group(found.low, found.high);
    write(wire.scale, group.scale);
    write(wire.zero, group.zero);
    if (!group.is_finite()) {
      __builtin_memset(wire.codes, 0, static_cast<std::size_t>(code_nbytes(count, 4)));
    } else if (is_full) {
      Isa::quantize_int4(x, T{}, group.half_zero, group.inverse, wire.codes);
    } else {
      Scalar<T>::quantize_int4(x, count, group.half_zero, group.inverse, wire.codes);
    }
  }

  static void decode(const WirePlace<const std::byte>& wire, int count, std::byte* x) {
    const float scale = to_float(read<Bf16>(wire.scale));
    const float zero = to_float(read<Bf16>(wire.zero));
    if (count != kSize || !decodes_in_range<T>(scale, zero, kMaxInt4Code)) {
      Scalar<T>::dequantize_int4(wire.codes, count, scale, zero, x);
    } else {
      Isa::dequantize_int4(wire.codes, scale, zero, x, T{});
    }
  }
};

// Calls fn(x, count, place) for each group of the run. Values and codes of consecutive groups are consecutive too.
template <typename X, typename Byte, typename Fn>
void for_each_group(const RunLayout& run, std::size_t value_nbytes, X* tensor, Byte* wire, const Fn& fn) {
  if (run.num_groups == 0) return;
  std::int64_t col = run.group_begin % run.groups_per_row * run.group_size;
  X* x = tensor + static_cast<std::size_t>(run.place(0).element) * value_nbytes;
  WirePlace<Byte> place = {wire, wire + run.zeros_offset, wire + run.codes_offset};
  for (std::int64_t index = 0; index < run.num_groups; ++index) {
    const std::int64_t left = run.cols - col;
    const int count = left < run.group_size ? static_cast<int>(left) : run.group_size;
    fn(x, count, place);
    x += static_cast<std::size_t>(count) * value_nbytes;
    place.scale += sizeof(Bf16);
    place.zero += sizeof(Bf16);
    place.codes += code_nbytes(count, run.code_bits);
    col = left <= run.group_size ? 0 : col + run.group_size;
  }
}

inline void clear_padding(const RunLayout& run, std::byte* wire) {
  const std::int64_t used = run.num_groups * static_cast<std::int64_t>(sizeof(Bf16));
  const std::int64_t sections[] = {0, run.zeros_offset};
  for (int i = 0; i < (run.has_zeros ? 2 : 1); ++i) {
    __builtin_memset(wire + sections[i] + used, 0, static_cast<std::size_t>(run.zeros_offset - used));
  }
}

template <class Groups, typename T>
void encode_run(const RunLayout& run, const std::byte* src, std::byte* wire) {
  clear_padding(run, wire);
  for_each_group(run, sizeof(T), src, wire, [](const std::byte* x, int count, const WirePlace<std::byte>& place) {
    Groups::encode(x, count, place);
  });
}

template <class Groups, typename T>
void decode_run(const RunLayout& run, const std::byte* wire, std::byte* dst) {
  for_each_group(run, sizeof(T), dst, wire, [](std::byte* x, int count, const WirePlace<const std::byte>& place) {
    Groups::decode(place, count, x);
  });
}

// Calls fn(Groups{}, T{}) for a codec and the run's group size.
template <class Isa, typename T, typename Fn>
void dispatch_groups(CodecId codec, const RunLayout& run, const Fn& fn) {
  if (codec == CodecId::int4) return fn(Int4Groups<Isa, T>{}, T{});
  if (run.group_size == 32) return fn(Int8Groups<Isa, T, 32>{}, T{});
  if (run.group_size == 64) return fn(Int8Groups<Isa, T, 64>{}, T{});
  fn(Int8Groups<Isa, T, 128>{}, T{});
}

// `dtype` is quantizable. No dispatch_float: its error text would bring library code into this file.
template <class Isa, typename Fn>
void dispatch(CodecId codec, DType dtype, const RunLayout& run, const Fn& fn) {
  if (dtype == DType::float32) return dispatch_groups<Isa, float>(codec, run, fn);
  if (dtype == DType::bfloat16) return dispatch_groups<Isa, Bf16>(codec, run, fn);
  dispatch_groups<Isa, Fp16>(codec, run, fn);
}

template <class Isa>
void encode_with(CodecId codec, DType dtype, const RunLayout& run, const std::byte* src, std::byte* wire) {
  dispatch<Isa>(codec, dtype, run,
                [&](auto groups, auto value) { encode_run<decltype(groups), decltype(value)>(run, src, wire); });
}

template <class Isa>
void decode_with(CodecId codec, DType dtype, const RunLayout& run, const std::byte* wire, std::byte* dst) {
  dispatch<Isa>(codec, dtype, run,
                [&](auto groups, auto value) { decode_run<decltype(groups), decltype(value)>(run, wire, dst); });
}

}  // namespace
}  // namespace pipecomm
