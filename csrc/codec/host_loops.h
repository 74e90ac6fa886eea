// The loops over groups, once for all instruction sets. An Isa gives the operations on whole groups; scalar code, the
// same for every Isa, does what is left. Where a codec or a transform works on float32, a batch is staged: brought to
// float32 in a buffer that the first-level cache holds.
// Include inside the region of #pragma GCC target and after every other header: all names here are local to the file
// that includes it, so that no other file can pick up a copy compiled for an instruction set it must not use.
#pragma once

#include <type_traits>

#include "codec/host.h"
#include "codec/philox.h"
#include "codec/plain_ops.h"
#include "codec/spike_loops.h"
#include "codec/walk.h"

namespace pipecomm {
namespace {

inline constexpr std::int64_t kScaleNbytes = sizeof(Bf16);
inline constexpr int kMaxGroupSize = 128;

inline void write_bf16s(const std::uint32_t* bits, int count, std::byte* to) {
  std::uint16_t narrow[kBatchSize];
  for (int g = 0; g < kBatchSize; ++g) narrow[g] = static_cast<std::uint16_t>(bits[g]);
  if (count == kBatchSize) {
    __builtin_memcpy(to, narrow, sizeof(narrow));
  } else {
    __builtin_memcpy(to, narrow, static_cast<std::size_t>(count) * sizeof(Bf16));
  }
}

// The float32 bits of an order key of T's own bits. In 32 bits throughout, for the same reason as in walk.h.
template <typename T>
std::uint32_t bits_of_key(std::uint32_t key) {
  constexpr std::uint32_t kSign = 1u << (8 * sizeof(T) - 1);
  return widen<T>((key & kSign) != 0 ? key ^ kSign : key ^ (kSign | (kSign - 1)));
}

// All calls of a group side by side, word by word, so that they vectorize.
template <int kGroupSize>
void fill_noise(const NoiseKey& key, std::int64_t group, float* noise) {
  constexpr int kCalls = kGroupSize / kNoisePerCall;
  const NoiseKey local = key;
  std::uint32_t words[4][std::size_t{kCalls}];
  for (int i = 0; i < kCalls; ++i) {
    const PhiloxWords found = local.words(static_cast<std::uint64_t>(group * kCalls + i));
    words[0][i] = found.word[0];
    words[1][i] = found.word[1];
    words[2][i] = found.word[2];
    words[3][i] = found.word[3];
  }
  for (int i = 0; i < kCalls; ++i) {
    const PhiloxWords found = {{words[0][i], words[1][i], words[2][i], words[3][i]}};
    for (int j = 0; j < kNoisePerCall; ++j) noise[i * kNoisePerCall + j] = noise_of(found, j);
  }
}

// Scales and zeros of a batch, as floats; NaN or infinite where the group is not to be decoded.
struct DecodeScales {
  float scale[kBatchSize];
  float zero[kBatchSize];
};

template <class Isa, typename T, class Rule, int kGroupSize>
struct Groups {
  static constexpr bool kScansInPairs = !Rule::kIsSymmetric;

  // Of each group: its largest magnitude in `high` for symmetric rules; for others order keys of its smallest and
  // largest value. All of T's own bits.
  struct Extents {
    std::uint32_t low[kBatchSize] = {};
    std::uint32_t high[kBatchSize] = {};
  };

  // `noise`: null to round to nearest.
  static void encode(const EncodeBatch& batch, const Extents& extents, const NoiseKey* noise, std::byte* scales,
                     std::byte* zeros) {
    std::uint32_t scale[kBatchSize];
    std::uint32_t zero[kBatchSize];
    float half_zero[kBatchSize];
    float inverse[kBatchSize];
    for (int g = 0; g < kBatchSize; ++g) {
      const GroupCode group = group_code(extents.low[g], extents.high[g], noise != nullptr);
      scale[g] = group.scale;
      zero[g] = group.zero;
      half_zero[g] = group.half_zero;
      inverse[g] = group.inverse;
    }
    write_bf16s(scale, batch.size, scales);
    if constexpr (!Rule::kIsSymmetric) write_bf16s(zero, batch.size, zeros);
    std::uint32_t num_bad = 0;
    for (int g = 0; g < kBatchSize; ++g) num_bad += scale[g] == kNanBf16 ? 1u : 0u;
    if (batch.is_full && noise == nullptr && num_bad == 0) {
      for (int g = 0; g < kBatchSize; ++g) {
        const GroupCode group = {scale[g], zero[g], half_zero[g], inverse[g]};
        Isa::template quantize<kGroupSize>(Rule{}, batch.x[g], T{}, group, batch.codes[g]);
      }
      return;
    }
    for (int g = 0; g < batch.size; ++g) {
      const GroupCode group = {scale[g], zero[g], half_zero[g], inverse[g]};
      if (noise == nullptr || !group.is_finite()) {
        write_codes(batch.x[g], batch.count[g], group, batch.codes[g]);
      } else {
        write_noisy_codes(batch, g, group, *noise);
      }
    }
  }

  static GroupCode group_code(std::uint32_t low, std::uint32_t high, bool is_stochastic) {
    if constexpr (Rule::kIsSymmetric) return Rule::group(0, widen<T>(high), is_stochastic);
    return Rule::group(bits_of_key<T>(low), bits_of_key<T>(high), is_stochastic);
  }

  static void scan(const EncodeBatch& batch, Extents& extents) {
    std::uint32_t* low = extents.low;
    std::uint32_t* high = extents.high;
    if (!batch.is_full) {
      for (int g = 0; g < batch.size; ++g) scan_one(batch.x[g], batch.count[g], low[g], high[g]);
    } else if constexpr (Rule::kIsSymmetric) {
      for (int g = 0; g < kBatchSize; ++g) high[g] = Isa::template max_magnitude<kGroupSize>(batch.x[g], T{});
    } else {
      for (int g = 0; g < kBatchSize; g += 2) {
        Isa::template extremes_of_two<Isa>(batch.x[g], batch.x[g + 1], T{}, low + g, high + g);
      }
    }
  }

  static void scan_one(const std::byte* x, int count, std::uint32_t& low, std::uint32_t& high) {
    const bool is_full = count == kGroupSize;
    if constexpr (Rule::kIsSymmetric) {
      high = is_full ? Isa::template max_magnitude<kGroupSize>(x, T{}) : Scalar<T>::max_magnitude(x, count);
    } else {
      static_assert(kGroupSize == kBlockSize);
      const Extremes found = is_full ? Isa::extremes(x, T{}) : Scalar<T>::extremes(x, count);
      low = found.low;
      high = found.high;
    }
  }

  static void write_codes(const std::byte* x, int count, const GroupCode& group, std::byte* codes) {
    if (!group.is_finite()) {
      __builtin_memset(codes, 0, static_cast<std::size_t>(code_nbytes(count, Rule::kCodeBits)));
    } else if (count != kGroupSize) {
      Scalar<T>::template quantize<Rule>(x, count, group, codes);
    } else {
      Isa::template quantize<kGroupSize>(Rule{}, x, T{}, group, codes);
    }
  }

  static void write_noisy_codes(const EncodeBatch& batch, int g, const GroupCode& group, const NoiseKey& key) {
    if constexpr (Rule::kIsInteger && std::is_same_v<T, float>) {
      float noise[std::size_t{kGroupSize}];
      fill_noise<kGroupSize>(key, batch.first_group + g, noise);
      const int count = batch.count[g] == kGroupSize ? kGroupSize : batch.count[g];
      Scalar<T>::template quantize<Rule>(batch.x[g], count, group, noise, batch.codes[g]);
    }
  }

  static void decode(const DecodeBatch& batch, const DecodeScales& scales) {
    std::uint32_t num_in_range = 0;
    for (int g = 0; g < kBatchSize; ++g) {
      const float zero = Rule::kIsSymmetric ? 0.0f : scales.zero[g];
      num_in_range += decodes_in_range<T>(scales.scale[g], zero, Rule::kMaxLevel) ? 1u : 0u;
    }
    if (batch.is_full && num_in_range == kBatchSize) {
      for (int g = 0; g < kBatchSize; ++g) {
        const float zero = Rule::kIsSymmetric ? 0.0f : scales.zero[g];
        Isa::template dequantize<kGroupSize>(Rule{}, batch.codes[g], scales.scale[g], zero, batch.x[g], T{});
      }
      return;
    }
    for (int g = 0; g < batch.size; ++g) {
      const float scale = scales.scale[g];
      const float zero = Rule::kIsSymmetric ? 0.0f : scales.zero[g];
      if (batch.count[g] == kGroupSize && decodes_in_range<T>(scale, zero, Rule::kMaxLevel)) {
        Isa::template dequantize<kGroupSize>(Rule{}, batch.codes[g], scale, zero, batch.x[g], T{});
      } else {
        Scalar<T>::template dequantize<Rule>(batch.codes[g], batch.count[g], scale, zero, batch.x[g]);
      }
    }
  }
};

// A batch in float32, and its way from and to T.
template <class Isa, typename T>
class Stage {
 public:
  explicit Stage(int group_size) : group_size_(group_size) {}

  template <class FloatGroups>
  EncodeBatch load(const EncodeBatch& batch, typename FloatGroups::Extents& extents) {
    EncodeBatch staged = batch;
    for (int g = 0; g < batch.size; ++g) staged.x[g] = reinterpret_cast<const std::byte*>(room_ + g * group_size_);
    if (FloatGroups::kScansInPairs && batch.is_full && batch.in_block[0] == InBlock::first) {
      Isa::template transform_and_scan<Isa>(batch.x[0], T{}, room_, extents.low, extents.high);
      return staged;
    }
    for (int g = 0; g < batch.size; ++g) {
      float* at = room_ + g * group_size_;
      if (batch.in_block[g] == InBlock::first) Isa::transform(batch.x[g], T{}, at);
      if (batch.in_block[g] == InBlock::none) load_values(batch.x[g], batch.count[g], at);
    }
    FloatGroups::scan(staged, extents);
    return staged;
  }

  DecodeBatch room_for(const DecodeBatch& batch) {
    DecodeBatch staged = batch;
    for (int g = 0; g < batch.size; ++g) staged.x[g] = reinterpret_cast<std::byte*>(room_ + g * group_size_);
    return staged;
  }

  void store(const DecodeBatch& batch, const DecodeScales& scales) {
    for (int g = 0; g < batch.size; ++g) {
      if (batch.in_block[g] == InBlock::rest) continue;
      const bool is_block = batch.in_block[g] == InBlock::first;
      const int count = is_block ? kTransformWidth : batch.count[g];
      float* at = room_ + g * group_size_;
      if (!are_finite(scales, g, is_block ? kTransformWidth / group_size_ : 1)) {
        for (int i = 0; i < count; ++i) write_decoded<T>(batch.x[g], i, 0.0f, bits_to_float(kInfinityBits), 0.0f);
      } else if (is_block) {
        Isa::transform_back(at, batch.x[g], T{});
      } else {
        store_values(at, count, batch.x[g]);
      }
    }
  }

 private:
  static void load_values(const std::byte* x, int count, float* out) {
    int i = 0;
    for (; i + kBlockSize <= count; i += kBlockSize) Isa::to_floats(x + at(i), T{}, out + i);
    for (; i < count; ++i) out[i] = read_float<T>(x, i);
  }
  static void store_values(const float* in, int count, std::byte* x) {
    int i = 0;
    for (; i + kBlockSize <= count; i += kBlockSize) Isa::from_floats(in + i, x + at(i), T{});
    for (; i < count; ++i) write_decoded<T>(x, i, in[i], 0.0f, 0.0f);
  }
  static std::size_t at(int i) { return static_cast<std::size_t>(i) * sizeof(T); }
  static bool are_finite(const DecodeScales& scales, int g, int num_groups) {
    for (int i = g; i < g + num_groups; ++i) {
      if (!is_finite_bits(float_to_bits(scales.scale[i])) || !is_finite_bits(float_to_bits(scales.zero[i])))
        return false;
    }
    return true;
  }

  int group_size_;
  alignas(64) float room_[kBatchSize * kMaxGroupSize];
};

inline void clear_padding(const RunLayout& run, std::byte* wire) {
  const std::int64_t used = run.num_groups * kScaleNbytes;
  const std::int64_t sections[] = {0, run.zeros_offset};
  for (int i = 0; i < (run.has_zeros ? 2 : 1); ++i) {
    __builtin_memset(wire + sections[i] + used, 0, static_cast<std::size_t>(run.zeros_offset - used));
  }
  const std::int64_t spikes_end = run.spikes_offset + run.num_groups * run.num_spikes * 2;
  const std::int64_t places_end = run.places_offset + run.num_groups * run.num_spikes;
  __builtin_memset(wire + spikes_end, 0, static_cast<std::size_t>(run.places_offset - spikes_end));
  __builtin_memset(wire + places_end, 0, static_cast<std::size_t>(run.codes_offset - places_end));
}

inline void read_bf16s(const std::byte* from, const DecodeBatch& batch, float* values) {
  std::uint16_t bits[kBatchSize] = {};
  __builtin_memcpy(bits, from, batch.is_full ? sizeof(bits) : static_cast<std::size_t>(batch.size) * sizeof(Bf16));
  for (int g = 0; g < kBatchSize; ++g) values[g] = bits_to_float(static_cast<std::uint32_t>(bits[g]) << 16);
}

inline DecodeScales read_scales(const DecodeBatch& batch, const std::byte* scales, const std::byte* zeros,
                                const RunLayout& run) {
  DecodeScales found = {};
  read_bf16s(scales, batch, found.scale);
  if (run.has_zeros) read_bf16s(zeros, batch, found.zero);
  if (!run.has_transform) return found;
  for (int g = 0; g < batch.size; ++g) {
    const float guard = batch.in_block[g] == InBlock::none ? 1.0f : kGuard;
    found.scale[g] = multiply(found.scale[g], guard);
    found.zero[g] = multiply(found.zero[g], guard);
  }
  return found;
}

template <class Isa, typename T, class Rule, int kGroupSize, bool kIsStaged>
void encode_run(const RunLayout& run, const NoiseKey* noise, const std::byte* src, std::byte* wire) {
  clear_padding(run, wire);
  using Coded = std::conditional_t<kIsStaged, float, T>;
  using CodedGroups = Groups<Isa, Coded, Rule, kGroupSize>;
  SpikeStage<Isa, T, kGroupSize> spikes;
  Stage<Isa, T> stage(kGroupSize);
  for_each_batch(run, sizeof(T), src, wire, [&](const EncodeBatch& all, std::byte* scales, std::byte* zeros) {
    const EncodeBatch& batch = run.num_spikes == 0 ? all : spikes.take(run, all, wire);
    typename CodedGroups::Extents extents;
    if constexpr (kIsStaged) {
      const EncodeBatch staged = stage.template load<CodedGroups>(batch, extents);
      CodedGroups::encode(staged, extents, noise, scales, zeros);
    } else {
      CodedGroups::scan(batch, extents);
      CodedGroups::encode(batch, extents, nullptr, scales, zeros);
    }
  });
}

// The instruction set as it writes what is read again at once.
template <class Ops>
struct Cached {
  using Isa = Ops;
};

template <class Isa, typename T, class Rule, int kGroupSize, bool kIsStaged>
void decode_run(const RunLayout& run, const std::byte* wire, std::byte* dst) {
  Stage<Isa, T> stage(kGroupSize);
  for_each_batch(run, sizeof(T), dst, wire,
                 [&](const DecodeBatch& batch, const std::byte* scale_bytes, const std::byte* zero_bytes) {
                   const DecodeScales scales = read_scales(batch, scale_bytes, zero_bytes, run);
                   if constexpr (kIsStaged) {
                     using CachedIsa = typename Cached<Isa>::Isa;
                     Groups<CachedIsa, float, Rule, kGroupSize>::decode(stage.room_for(batch), scales);
                     stage.store(batch, scales);
                   } else {
                     Groups<Isa, T, Rule, kGroupSize>::decode(batch, scales);
                   }
                   if (run.num_spikes != 0) put_spikes<T>(run, batch, wire);
                 });
}

// Calls fn(Rule{}, std::integral_constant<int, group size>{}).
template <class Rule, typename Fn>
void dispatch_size(int group_size, const Fn& fn) {
  if (group_size == 32) return fn(Rule{}, std::integral_constant<int, 32>{});
  if (group_size == 64) return fn(Rule{}, std::integral_constant<int, 64>{});
  fn(Rule{}, std::integral_constant<int, 128>{});
}
template <typename Fn>
void dispatch_rule(CodecId codec, int group_size, const Fn& fn) {
  if (codec == CodecId::int8) return dispatch_size<Int8Rule>(group_size, fn);
  if (codec == CodecId::fp8) return dispatch_size<Fp8Rule>(group_size, fn);
  if (codec == CodecId::int4) return fn(Int4Rule{}, std::integral_constant<int, 32>{});
  if (codec == CodecId::int4_symmetric) return fn(Int4SymmetricRule{}, std::integral_constant<int, 64>{});
  fn(Nf4Rule{}, std::integral_constant<int, 64>{});
}

// `dtype` is quantizable. No dispatch_float: its error text would bring library code into this file.
template <typename Fn>
void dispatch_dtype(DType dtype, const Fn& fn) {
  if (dtype == DType::float32) return fn(float{});
  if (dtype == DType::bfloat16) return fn(Bf16{});
  fn(Fp16{});
}

template <class Isa>
void encode_with(const CodecSpec& spec, DType dtype, const RunLayout& run, std::uint64_t sequence, const std::byte* src,
                 std::byte* wire) {
  const NoiseKey key{spec.seed, sequence};
  const NoiseKey* noise = spec.rounding == Rounding::stochastic ? &key : nullptr;
  dispatch_dtype(dtype, [&](auto value) {
    dispatch_rule(spec.id, run.group_size, [&](auto rule, auto size) {
      using T = decltype(value);
      using Rule = decltype(rule);
      if constexpr (Rule::kIsInteger || std::is_same_v<T, float>) {
        const bool is_direct = noise == nullptr && !run.has_transform;
        if (is_direct) return encode_run<Isa, T, Rule, size(), false>(run, nullptr, src, wire);
      }
      encode_run<Isa, T, Rule, size(), true>(run, noise, src, wire);
    });
  });
}

template <class Isa>
void decode_with(const CodecSpec& spec, DType dtype, const RunLayout& run, const std::byte* wire, std::byte* dst) {
  dispatch_dtype(dtype, [&](auto value) {
    dispatch_rule(spec.id, run.group_size, [&](auto rule, auto size) {
      using T = decltype(value);
      using Rule = decltype(rule);
      if constexpr (!std::is_same_v<Rule, Fp8Rule> || std::is_same_v<T, float>) {
        if (!run.has_transform) return decode_run<Isa, T, Rule, size(), false>(run, wire, dst);
      }
      decode_run<Isa, T, Rule, size(), true>(run, wire, dst);
    });
  });
}

}  // namespace
}  // namespace pipecomm
