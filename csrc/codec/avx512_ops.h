// The operations on groups in AVX-512 (F, BW, DQ, VL), all but the transform.
// Local to the including file for the reason given in host_loops.h.
#pragma once

#include <immintrin.h>

#include "codec/plain_ops.h"

namespace pipecomm {
namespace {

// A block is two registers of 16 floats. kStreams: decoded values go past the caches; they are aligned to 64 bytes.
template <bool kStreams>
struct Avx512Ops : PlainOps {
  // And not by using-declarations: clang takes the constrained templates below for redefinitions of theirs.
  template <int kCount, class Rule, typename T>
    requires(Rule::kCodeBits != 4)
  static void quantize(Rule rule, const std::byte* x, T value, const GroupCode& group, std::byte* codes) {
    PlainOps::quantize<kCount>(rule, x, value, group, codes);
  }
  template <int kCount, class Rule, typename T>
    requires(Rule::kCodeBits != 4)
  static void dequantize(Rule rule, const std::byte* codes, float scale, float zero, std::byte* x, T value) {
    PlainOps::dequantize<kCount>(rule, codes, scale, zero, x, value);
  }

  static constexpr std::size_t kLanes = 16;

  // 32 neighbouring values.
  struct Pair {
    __m512 low;
    __m512 high;
  };

  static __m256i load_half(const std::byte* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
  static Pair load(const std::byte* x, float) { return {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 64)}; }
  // One permutation puts 16 of them into the upper halves of as many words.
  static Pair load(const std::byte* x, Bf16) {
    const __m512i bits = _mm512_loadu_si512(x);
    const __m512i order =
        _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 16);
    const __m512i upper = _mm512_add_epi32(order, _mm512_set1_epi32(16 << 16));
    return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, order, bits)),
            _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, upper, bits))};
  }
  static Pair load(const std::byte* x, Fp16) {
    return {_mm512_cvtph_ps(load_half(x)), _mm512_cvtph_ps(load_half(x + 32))};
  }

  static void store_half(std::byte* x, __m256i values) {
    auto* at = reinterpret_cast<__m256i*>(x);
    kStreams ? _mm256_stream_si256(at, values) : _mm256_storeu_si256(at, values);
  }
  static void store_all(std::byte* x, __m512i values) {
    auto* at = reinterpret_cast<__m512i*>(x);
    kStreams ? _mm512_stream_si512(at, values) : _mm512_storeu_si512(at, values);
  }
  static void store(std::byte* x, Pair values, float) {
    store_all(x, _mm512_castps_si512(values.low));
    store_all(x + 64, _mm512_castps_si512(values.high));
  }
  // Finite values; the upper half of each word is the rounded bf16.
  static __m512i rounded(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_sub_epi32(sum, is_odd, sum, _mm512_set1_epi32(-1));
  }
  static void store(std::byte* x, Pair values, Bf16) {
    // Odd 16-bit words: of the first register, then of the second.
    const __m512i indices = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i fours = _mm512_mullo_epi32(indices, _mm512_set1_epi32(0x40004));
    const __m512i odd = _mm512_add_epi32(fours, _mm512_set1_epi32(0x30001));
    store_all(x, _mm512_permutex2var_epi16(rounded(values.low), odd, rounded(values.high)));
  }
  static void store(std::byte* x, Pair values, Fp16 value) {
    store_half(x, narrow(values.low, value));
    store_half(x + 32, narrow(values.high, value));
  }
  // Finite values as 16-bit floats.
  static __m256i narrow(__m512 values, Bf16) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(values), 16)); }
  static __m256i narrow(__m512 values, Fp16) {
    return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  // 16-bit floats are compared as they are; minpos finds the smallest of eight.
  static std::uint16_t min_u16(__m256i values) {
    const __m128i of8 = _mm_min_epu16(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    return static_cast<std::uint16_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(of8)));
  }
  static std::uint16_t max_u16(__m256i values) {
    const __m128i of8 = _mm_max_epu16(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    const __m128i inverted = _mm_xor_si128(of8, _mm_set1_epi32(-1));
    return static_cast<std::uint16_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(inverted)));
  }
  static __m256i low_half(__m512i values) { return _mm512_castsi512_si256(values); }
  static __m256i high_half(__m512i values) { return _mm512_extracti64x4_epi64(values, 1); }

  template <int kCount, typename T>
  static std::uint32_t max_magnitude(const std::byte* x, T) {
    __m512i largest = _mm512_setzero_si512();
    for (std::size_t i = 0; i < kCount * sizeof(T); i += 64) {
      const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi16(0x7fff));
      largest = _mm512_max_epu16(largest, bits);
    }
    return max_u16(_mm256_max_epu16(low_half(largest), high_half(largest)));
  }
  template <int kCount>
  static std::uint32_t max_magnitude(const std::byte* x, float) {
    __m512i largest = _mm512_setzero_si512();
    for (std::size_t i = 0; i < kCount * sizeof(float); i += 64) {
      const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7fffffff));
      largest = _mm512_max_epu32(largest, bits);
    }
    return _mm512_reduce_max_epu32(largest);
  }

  template <int kCount, typename T>
  static std::uint32_t min_magnitude(const std::byte* x, T) {
    __m512i smallest = _mm512_set1_epi32(-1);
    for (std::size_t i = 0; i < kCount * sizeof(T); i += 64) {
      const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi16(0x7fff));
      smallest = _mm512_min_epu16(smallest, bits);
    }
    return min_u16(_mm256_min_epu16(low_half(smallest), high_half(smallest)));
  }
  template <int kCount>
  static std::uint32_t min_magnitude(const std::byte* x, float) {
    __m512i smallest = _mm512_set1_epi32(-1);
    for (std::size_t i = 0; i < kCount * sizeof(float); i += 64) {
      const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7fffffff));
      smallest = _mm512_min_epu32(smallest, bits);
    }
    return _mm512_reduce_min_epu32(smallest);
  }

  template <int kCount, typename T>
  static int place_of(const std::byte* x, T, std::uint32_t magnitude) {
    const __m512i wanted = _mm512_set1_epi16(static_cast<std::int16_t>(magnitude));
    for (int i = 0;; i += kBlockSize) {
      const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + 2 * i), _mm512_set1_epi16(0x7fff));
      const std::uint32_t found = _mm512_cmpeq_epi16_mask(bits, wanted);
      if (found != 0) return i + __builtin_ctz(found);
    }
  }
  template <int kCount>
  static int place_of(const std::byte* x, float, std::uint32_t magnitude) {
    const __m512i wanted = _mm512_set1_epi32(static_cast<std::int32_t>(magnitude));
    for (int i = 0;; i += static_cast<int>(kLanes)) {
      const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + 4 * i), _mm512_set1_epi32(0x7fffffff));
      const std::uint32_t found = _mm512_cmpeq_epi32_mask(bits, wanted);
      if (found != 0) return i + __builtin_ctz(found);
    }
  }

  template <typename T>
  static Extremes extremes(const std::byte* x, T) {
    const __m512i bits = _mm512_loadu_si512(x);
    const __m512i flip = _mm512_or_si512(_mm512_srai_epi16(bits, 15), _mm512_set1_epi16(INT16_MIN));
    const __m512i keys = _mm512_xor_si512(bits, flip);
    const __m256i a = low_half(keys);
    const __m256i b = high_half(keys);
    return {min_u16(_mm256_min_epu16(a, b)), max_u16(_mm256_max_epu16(a, b))};
  }
  static __m512i order_keys(__m512i bits) {
    const __m512i flip = _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(INT32_MIN));
    return _mm512_xor_si512(bits, flip);
  }
  static Extremes extremes(const std::byte* x, float) {
    const __m512i a = order_keys(_mm512_loadu_si512(x));
    const __m512i b = order_keys(_mm512_loadu_si512(x + 64));
    return {_mm512_reduce_min_epu32(_mm512_min_epu32(a, b)), _mm512_reduce_max_epu32(_mm512_max_epu32(a, b))};
  }

  using PlainOps::extremes_of_two;
  // All four numbers are folded at once, the maxima as minima of the inverted keys.
  template <class Isa>
  static void extremes_of_two(const std::byte* a, const std::byte* b, float, std::uint32_t* low, std::uint32_t* high) {
    const __m512i of_a = folded_extremes(a);
    const __m512i of_b = folded_extremes(b);
    const __m512i even = _mm512_shuffle_i32x4(of_a, of_b, _MM_SHUFFLE(2, 0, 2, 0));
    const __m512i odd = _mm512_shuffle_i32x4(of_a, of_b, _MM_SHUFFLE(3, 1, 3, 1));
    __m512i fours = _mm512_min_epu32(even, odd);
    fours = _mm512_min_epu32(fours, _mm512_shuffle_epi32(fours, _MM_PERM_BADC));
    fours = _mm512_min_epu32(fours, _mm512_shuffle_epi32(fours, _MM_PERM_CDAB));
    const __m512i order = _mm512_castsi128_si512(_mm_setr_epi32(0, 8, 4, 12));
    const __m128i found = _mm512_castsi512_si128(_mm512_permutexvar_epi32(order, fours));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(low), found);
    const __m128i inverted = _mm_xor_si128(found, _mm_set1_epi32(-1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(high), _mm_unpackhi_epi64(inverted, inverted));
  }
  // Eight candidates for the smallest key, then eight for the inverted largest.
  static __m512i folded_extremes(const std::byte* x) {
    const __m512i a = order_keys(_mm512_loadu_si512(x));
    const __m512i b = order_keys(_mm512_loadu_si512(x + 64));
    const __m512i low = _mm512_min_epu32(a, b);
    const __m512i high = _mm512_xor_si512(_mm512_max_epu32(a, b), _mm512_set1_epi32(-1));
    return _mm512_min_epu32(_mm512_shuffle_i32x4(low, high, _MM_SHUFFLE(1, 0, 1, 0)),
                            _mm512_shuffle_i32x4(low, high, _MM_SHUFFLE(3, 2, 3, 2)));
  }

  template <int kCount, typename T>
  static void quantize(Int8Rule, const std::byte* x, T value, const GroupCode& group, std::byte* codes) {
    const __m512 inverse = _mm512_set1_ps(group.inverse);
    for (std::size_t i = 0; i < kCount; i += kBlockSize) {
      const Pair values = load(x + i * sizeof(T), value);
      store_codes(codes + i, _mm512_cvtps_epi32(_mm512_mul_ps(values.low, inverse)));
      store_codes(codes + i + kLanes, _mm512_cvtps_epi32(_mm512_mul_ps(values.high, inverse)));
    }
  }
  static void store_codes(std::byte* codes, __m512i values) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(values));
  }

  static __m512i codes_of(Int4Rule, __m512 values, const GroupCode& group, float) {
    const __m512 halves = _mm512_mul_ps(values, _mm512_set1_ps(0.5f));
    const __m512 above = _mm512_sub_ps(halves, _mm512_set1_ps(group.half_zero));
    const __m512 steps = _mm512_mul_ps(above, _mm512_set1_ps(group.inverse));
    return _mm512_cvtps_epi32(_mm512_max_ps(steps, _mm512_setzero_ps()));
  }
  // Half of a 16-bit float is exact, so fusing it with the subtraction changes nothing; none is below zero.
  template <typename T>
  static __m512i codes_of(Int4Rule, __m512 values, const GroupCode& group, T) {
    const __m512 above = _mm512_fmsub_ps(values, _mm512_set1_ps(0.5f), _mm512_set1_ps(group.half_zero));
    return _mm512_cvtps_epi32(_mm512_mul_ps(above, _mm512_set1_ps(group.inverse)));
  }
  template <typename T>
  static __m512i codes_of(Int4SymmetricRule, __m512 values, const GroupCode& group, T) {
    const __m512i codes = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(group.inverse)));
    return _mm512_and_si512(codes, _mm512_set1_epi32(15));
  }
  // Bisects the bounds: after each step the code is right but for its lower bits.
  template <typename T>
  static __m512i codes_of(Nf4Rule, __m512 values, const GroupCode& group, T) {
    const __m512 bounds = _mm512_loadu_ps(kNf4Bounds.at);
    const __m512 fractions = _mm512_mul_ps(values, _mm512_set1_ps(group.inverse));
    __m512i codes = _mm512_setzero_si512();
    for (int bit = 8; bit > 0; bit /= 2) {
      const __m512i next = _mm512_add_epi32(codes, _mm512_set1_epi32(bit - 1));
      const __mmask16 is_above = _mm512_cmp_ps_mask(fractions, _mm512_permutexvar_ps(next, bounds), _CMP_GT_OQ);
      codes = _mm512_mask_add_epi32(codes, is_above, codes, _mm512_set1_epi32(bit));
    }
    return codes;
  }
  template <int kCount, class Rule, typename T>
    requires(Rule::kCodeBits == 4)
  static void quantize(Rule rule, const std::byte* x, T value, const GroupCode& group, std::byte* codes) {
    const auto pack = [&](__m512 low, __m512 high, std::byte* at) {
      const __m512i upper = _mm512_slli_epi32(codes_of(rule, high, group, value), 4);
      store_codes(at, _mm512_or_si512(codes_of(rule, low, group, value), upper));
    };
    if constexpr (kCount == kBlockSize) {
      const Pair values = load(x, value);
      pack(values.low, values.high, codes);
    } else {
      for (std::size_t i = 0; i < kCount / 2; i += kBlockSize) {
        const Pair low = load(x + i * sizeof(T), value);
        const Pair high = load(x + (i + kCount / 2) * sizeof(T), value);
        pack(low.low, high.low, codes + i);
        pack(low.high, high.high, codes + i + kLanes);
      }
    }
  }

  static __m128i load_codes(const std::byte* codes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)); }
  template <int kCount, typename T>
  static void dequantize(Int8Rule, const std::byte* codes, float scale, float, std::byte* x, T value) {
    for (std::size_t i = 0; i < kCount; i += kBlockSize) {
      store(x + i * sizeof(T), {scaled(codes + i, scale), scaled(codes + i + kLanes, scale)}, value);
    }
  }
  static __m512 scaled(const std::byte* codes, float scale) {
    const __m512 steps = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_codes(codes)));
    return _mm512_mul_ps(steps, _mm512_set1_ps(scale));
  }

  // What each of the 16 codes decodes to.
  template <class Rule>
  static __m512 table_of(float scale, float zero) {
    const __m512 steps = _mm512_mul_ps(_mm512_loadu_ps(kLevels<Rule>.at), _mm512_set1_ps(scale));
    return _mm512_add_ps(_mm512_set1_ps(zero), steps);
  }
  template <int kCount, class Rule>
    requires(Rule::kCodeBits == 4)
  static void dequantize(Rule, const std::byte* codes, float scale, float zero, std::byte* x, float) {
    const __m512 table = table_of<Rule>(scale, zero);
    for (std::size_t i = 0; i < kCount / 2; i += kLanes) {
      const __m512i bytes = _mm512_cvtepu8_epi32(load_codes(codes + i));
      const __m512 upper = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
      store_all(x + i * sizeof(float), _mm512_castps_si512(_mm512_permutexvar_ps(bytes, table)));
      store_all(x + (i + kCount / 2) * sizeof(float), _mm512_castps_si512(upper));
    }
  }
  template <int kCount, class Rule, typename T>
    requires(Rule::kCodeBits == 4)
  static void dequantize(Rule, const std::byte* codes, float scale, float zero, std::byte* x, T value) {
    const __m512i table = _mm512_castsi256_si512(narrow(table_of<Rule>(scale, zero), value));
    for (std::size_t i = 0; i < kCount / 2; i += kLanes) {
      const __m256i bytes = _mm256_cvtepu8_epi16(load_codes(codes + i));
      const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi16(15));
      const __m512i indices = _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_srli_epi16(bytes, 4), 1);
      const __m512i values = _mm512_permutexvar_epi16(indices, table);
      store_half(x + i * sizeof(T), low_half(values));
      store_half(x + (i + kCount / 2) * sizeof(T), high_half(values));
    }
  }

  template <typename T>
  static void to_floats(const std::byte* x, T value, float* out) {
    const Pair values = load(x, value);
    _mm512_storeu_ps(out, values.low);
    _mm512_storeu_ps(out + kLanes, values.high);
  }
  template <typename T>
  static __m512 limited(__m512 values) {
    const __m512 above = _mm512_max_ps(values, _mm512_set1_ps(-max_finite<T>()));
    return _mm512_min_ps(above, _mm512_set1_ps(max_finite<T>()));
  }
  template <typename T>
  static void from_floats(const float* in, std::byte* x, T value) {
    store(x, {limited<T>(_mm512_loadu_ps(in)), limited<T>(_mm512_loadu_ps(in + kLanes))}, value);
  }
};

}  // namespace
}  // namespace pipecomm
