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

// Groups are coded in batches, so that the compiler computes the scales of a batch side by side. It does where they
// are stored as 32 bits, and no type of another width is in the loop.
inline constexpr int kBatchSize = 16;

inline constexpr std::int64_t kScaleNbytes = sizeof(Bf16);

inline Bf16 to_bf16(std::uint32_t bits) { return Bf16{static_cast<std::uint16_t>(bits)}; }

// The float32 bits of an order key of T's own bits. In 32 bits throughout, for the same reason.
template <typename T>
std::uint32_t bits_of_key(std::uint32_t key) {
  constexpr std::uint32_t kSign = 1u << (8 * sizeof(T) - 1);
  return widen<T>((key & kSign) != 0 ? key ^ kSign : key ^ (kSign | (kSign - 1)));
}

// The next groups of a run. X and Byte are std::byte or const std::byte.
template <typename X, typename Byte>
struct Batch {
  int size;
  X* x[kBatchSize];
  int count[kBatchSize];  // values of the group
  Byte* codes[kBatchSize];
};

using EncodeBatch = Batch<const std::byte, std::byte>;
using DecodeBatch = Batch<std::byte, const std::byte>;

template <class Isa, typename T, int kGroupSize>
struct Int8Groups {
  static void encode(const EncodeBatch& batch, std::byte* scales, std::byte*) {
    std::uint32_t largest[kBatchSize] = {};
    for (int g = 0; g < batch.size; ++g) {
      largest[g] = batch.count[g] == kGroupSize ? Isa::template max_magnitude<kGroupSize>(batch.x[g], T{})
                                                : Scalar<T>::max_magnitude(batch.x[g], batch.count[g]);
    }
    std::uint32_t scale[kBatchSize];
    float inverse[kBatchSize];
    for (int g = 0; g < kBatchSize; ++g) {
      const Int8Group group = int8_group(widen<T>(largest[g]));
      scale[g] = group.scale.bits;
      inverse[g] = group.inverse;
    }
    for (int g = 0; g < batch.size; ++g) {
      const Int8Group group = {to_bf16(scale[g]), inverse[g]};
      write(scales + g * kScaleNbytes, group.scale);
      write_codes(batch.x[g], batch.count[g], group, batch.codes[g]);
    }
  }

  static void write_codes(const std::byte* x, int count, const Int8Group& group, std::byte* codes) {
    if (!group.is_finite()) {
      __builtin_memset(codes, 0, static_cast<std::size_t>(count));
    } else if (count != kGroupSize) {
      Scalar<T>::quantize_int8(x, count, group.inverse, codes);
    } else {
      for (int i = 0; i < kGroupSize; i += kBlockSize) {
        Isa::quantize_int8(x + static_cast<std::size_t>(i) * sizeof(T), T{}, group.inverse, codes + i);
      }
    }
  }

  static void decode(const DecodeBatch& batch, const std::byte* scales, const std::byte*) {
    for (int g = 0; g < batch.size; ++g) {
      const float scale = to_float(read<Bf16>(scales + g * kScaleNbytes));
      if (batch.count[g] != kGroupSize || !decodes_in_range<T>(scale, 0.0f, kMaxInt8Code + 1)) {
        Scalar<T>::dequantize_int8(batch.codes[g], batch.count[g], scale, batch.x[g]);
        continue;
      }
      for (int i = 0; i < kGroupSize; i += kBlockSize) {
        Isa::dequantize_int8(batch.codes[g] + i, scale, batch.x[g] + static_cast<std::size_t>(i) * sizeof(T), T{});
      }
    }
  }
};

template <class Isa, typename T>
struct Int4Groups {
  static void encode(const EncodeBatch& batch, std::byte* scales, std::byte* zeros) {
    std::uint32_t low[kBatchSize] = {};
    std::uint32_t high[kBatchSize] = {};
    for (int g = 0; g < batch.size; ++g) {
      const bool is_full = batch.count[g] == kBlockSize;
      const Extremes found = is_full ? Isa::extremes(batch.x[g], T{}) : Scalar<T>::extremes(batch.x[g], batch.count[g]);
      low[g] = found.low;
      high[g] = found.high;
    }
    std::uint32_t scale[kBatchSize];
    std::uint32_t zero[kBatchSize];
    float half_zero[kBatchSize];
    float inverse[kBatchSize];
    for (int g = 0; g < kBatchSize; ++g) {
      const Int4Group group = int4_group(bits_of_key<T>(low[g]), bits_of_key<T>(high[g]));
      scale[g] = group.scale.bits;
      zero[g] = group.zero.bits;
      half_zero[g] = group.half_zero;
      inverse[g] = group.inverse;
    }
    for (int g = 0; g < batch.size; ++g) {
      const Int4Group group = {to_bf16(scale[g]), to_bf16(zero[g]), half_zero[g], inverse[g]};
      write(scales + g * kScaleNbytes, group.scale);
      write(zeros + g * kScaleNbytes, group.zero);
      write_codes(batch.x[g], batch.count[g], group, batch.codes[g]);
    }
  }

  static void write_codes(const std::byte* x, int count, const Int4Group& group, std::byte* codes) {
    if (!group.is_finite()) {
      __builtin_memset(codes, 0, static_cast<std::size_t>(code_nbytes(count, 4)));
    } else if (count != kBlockSize) {
      Scalar<T>::quantize_int4(x, count, group.half_zero, group.inverse, codes);
    } else {
      Isa::quantize_int4(x, T{}, group.half_zero, group.inverse, codes);
    }
  }

  static void decode(const DecodeBatch& batch, const std::byte* scales, const std::byte* zeros) {
    for (int g = 0; g < batch.size; ++g) {
      const float scale = to_float(read<Bf16>(scales + g * kScaleNbytes));
      const float zero = to_float(read<Bf16>(zeros + g * kScaleNbytes));
      if (batch.count[g] != kBlockSize || !decodes_in_range<T>(scale, zero, kMaxInt4Code)) {
        Scalar<T>::dequantize_int4(batch.codes[g], batch.count[g], scale, zero, batch.x[g]);
      } else {
        Isa::dequantize_int4(batch.codes[g], scale, zero, batch.x[g], T{});
      }
    }
  }
};

// Steps through a run without a division per group: values and codes of consecutive groups are consecutive.
template <typename X, typename Byte>
class Walk {
 public:
  // `run` has a group.
  Walk(const RunLayout& run, std::int64_t value_nbytes, X* tensor, Byte* wire)
      : run_(run),
        value_nbytes_(value_nbytes),
        x_(tensor + run.place(0).element * value_nbytes),
        codes_(wire + run.codes_offset),
        col_(run.group_begin % run.groups_per_row * run.group_size) {}

  void next(std::int64_t num_left, Batch<X, Byte>& batch) {
    batch.size = num_left < kBatchSize ? static_cast<int>(num_left) : kBatchSize;
    for (int g = 0; g < batch.size; ++g) {
      const std::int64_t left = run_.cols - col_;
      const int count = left < run_.group_size ? static_cast<int>(left) : run_.group_size;
      batch.x[g] = x_;
      batch.count[g] = count;
      batch.codes[g] = codes_;
      x_ += count * value_nbytes_;
      codes_ += code_nbytes(count, run_.code_bits);
      col_ = left == count ? 0 : col_ + count;
    }
  }

 private:
  const RunLayout& run_;
  std::int64_t value_nbytes_;
  X* x_;
  Byte* codes_;
  std::int64_t col_;
};

// Calls fn(batch, scales, zeros) for the run's groups, batch after batch.
template <typename X, typename Byte, typename Fn>
void for_each_batch(const RunLayout& run, std::int64_t value_nbytes, X* tensor, Byte* wire, const Fn& fn) {
  if (run.num_groups == 0) return;
  Walk<X, Byte> walk(run, value_nbytes, tensor, wire);
  Batch<X, Byte> batch;
  for (std::int64_t index = 0; index < run.num_groups; index += kBatchSize) {
    walk.next(run.num_groups - index, batch);
    Byte* scales = wire + index * kScaleNbytes;
    fn(batch, scales, scales + run.zeros_offset);
  }
}

inline void clear_padding(const RunLayout& run, std::byte* wire) {
  const std::int64_t used = run.num_groups * kScaleNbytes;
  const std::int64_t sections[] = {0, run.zeros_offset};
  for (int i = 0; i < (run.has_zeros ? 2 : 1); ++i) {
    __builtin_memset(wire + sections[i] + used, 0, static_cast<std::size_t>(run.zeros_offset - used));
  }
}

template <class Groups, typename T>
void encode_run(const RunLayout& run, const std::byte* src, std::byte* wire) {
  clear_padding(run, wire);
  for_each_batch(run, sizeof(T), src, wire, [](const EncodeBatch& batch, std::byte* scales, std::byte* zeros) {
    Groups::encode(batch, scales, zeros);
  });
}

template <class Groups, typename T>
void decode_run(const RunLayout& run, const std::byte* wire, std::byte* dst) {
  for_each_batch(run, sizeof(T), dst, wire,
                 [](const DecodeBatch& batch, const std::byte* scales, const std::byte* zeros) {
                   Groups::decode(batch, scales, zeros);
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
