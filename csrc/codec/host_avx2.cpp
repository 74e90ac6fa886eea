// Host loops for AVX2 with F16C. No static initialisers: this file is loaded on every processor.
#include "codec/host.h"
#include "codec/rules.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#include "codec/host_loops.h"

namespace pipecomm {
namespace {

// A block is four registers of 8 floats.
struct Avx2 : PlainOps {
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

  static constexpr std::size_t kLanes = 8;

  static __m256i load_bits(const std::byte* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
  static __m128i load_half(const std::byte* x) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x)); }
  static __m256 load(const std::byte* x, float) { return _mm256_castsi256_ps(load_bits(x)); }
  static __m256 load(const std::byte* x, Bf16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(x)), 16));
  }
  static __m256 load(const std::byte* x, Fp16) { return _mm256_cvtph_ps(load_half(x)); }

  static void store_bits(std::byte* x, __m256i bits) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), bits); }
  static void store_half(std::byte* x, __m128i bits) { _mm_storeu_si128(reinterpret_cast<__m128i*>(x), bits); }
  static void store(std::byte* x, __m256 values, float) { store_bits(x, _mm256_castps_si256(values)); }
  static void store(std::byte* x, __m256 values, Bf16) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), is_odd);
    const __m256i shifted = _mm256_srli_epi32(rounded, 16);
    const __m128i high = _mm256_extracti128_si256(shifted, 1);
    store_half(x, _mm_packus_epi32(_mm256_castsi256_si128(shifted), high));
  }
  static void store(std::byte* x, __m256 values, Fp16) {
    store_half(x, _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  // 16-bit floats are compared as they are; minpos finds the smallest of eight.
  static std::uint16_t min_u16(__m256i values) {
    const __m128i of8 = _mm_min_epu16(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    return static_cast<std::uint16_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(of8)));
  }
  static std::uint16_t max_u16(__m256i values) {
    return static_cast<std::uint16_t>(~min_u16(_mm256_xor_si256(values, _mm256_set1_epi32(-1))));
  }
  static std::uint32_t max_u32(__m256i values) {
    __m128i largest = _mm_max_epu32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    largest = _mm_max_epu32(largest, _mm_shuffle_epi32(largest, _MM_SHUFFLE(1, 0, 3, 2)));
    largest = _mm_max_epu32(largest, _mm_shuffle_epi32(largest, _MM_SHUFFLE(2, 3, 0, 1)));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(largest));
  }
  static std::uint32_t min_u32(__m256i values) { return ~max_u32(_mm256_xor_si256(values, _mm256_set1_epi32(-1))); }

  template <int kCount, typename T>
  static std::uint32_t max_magnitude(const std::byte* x, T) {
    __m256i largest = _mm256_setzero_si256();
    for (std::size_t i = 0; i < kCount * sizeof(T); i += 32) {
      largest = _mm256_max_epu16(largest, _mm256_and_si256(load_bits(x + i), _mm256_set1_epi16(0x7fff)));
    }
    return max_u16(largest);
  }
  template <int kCount>
  static std::uint32_t max_magnitude(const std::byte* x, float) {
    __m256i largest = _mm256_setzero_si256();
    for (std::size_t i = 0; i < kCount * sizeof(float); i += 32) {
      largest = _mm256_max_epu32(largest, _mm256_and_si256(load_bits(x + i), _mm256_set1_epi32(0x7fffffff)));
    }
    return max_u32(largest);
  }

  template <int kCount, typename T>
  static std::uint32_t min_magnitude(const std::byte* x, T) {
    __m256i smallest = _mm256_set1_epi32(-1);
    for (std::size_t i = 0; i < kCount * sizeof(T); i += 32) {
      smallest = _mm256_min_epu16(smallest, _mm256_and_si256(load_bits(x + i), _mm256_set1_epi16(0x7fff)));
    }
    return min_u16(smallest);
  }
  template <int kCount>
  static std::uint32_t min_magnitude(const std::byte* x, float) {
    __m256i smallest = _mm256_set1_epi32(-1);
    for (std::size_t i = 0; i < kCount * sizeof(float); i += 32) {
      smallest = _mm256_min_epu32(smallest, _mm256_and_si256(load_bits(x + i), _mm256_set1_epi32(0x7fffffff)));
    }
    return min_u32(smallest);
  }

  template <int kCount, typename T>
  static int place_of(const std::byte* x, T, std::uint32_t magnitude) {
    const __m256i wanted = _mm256_set1_epi16(static_cast<std::int16_t>(magnitude));
    for (int i = 0;; i += 16) {
      const __m256i bits = _mm256_and_si256(load_bits(x + 2 * i), _mm256_set1_epi16(0x7fff));
      const int found = _mm256_movemask_epi8(_mm256_cmpeq_epi16(bits, wanted));
      if (found != 0) return i + __builtin_ctz(static_cast<unsigned>(found)) / 2;
    }
  }
  template <int kCount>
  static int place_of(const std::byte* x, float, std::uint32_t magnitude) {
    const __m256i wanted = _mm256_set1_epi32(static_cast<std::int32_t>(magnitude));
    for (int i = 0;; i += 8) {
      const __m256i bits = _mm256_and_si256(load_bits(x + 4 * i), _mm256_set1_epi32(0x7fffffff));
      const int found = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, wanted)));
      if (found != 0) return i + __builtin_ctz(static_cast<unsigned>(found));
    }
  }

  static __m256i keys_u16(__m256i bits) {
    const __m256i flip = _mm256_or_si256(_mm256_srai_epi16(bits, 15), _mm256_set1_epi16(INT16_MIN));
    return _mm256_xor_si256(bits, flip);
  }
  template <typename T>
  static Extremes extremes(const std::byte* x, T) {
    const __m256i a = keys_u16(load_bits(x));
    const __m256i b = keys_u16(load_bits(x + 32));
    return {min_u16(_mm256_min_epu16(a, b)), max_u16(_mm256_max_epu16(a, b))};
  }
  static Extremes extremes(const std::byte* x, float) {
    __m256i low = _mm256_set1_epi32(-1);
    __m256i high = _mm256_setzero_si256();
    for (std::size_t i = 0; i < kBlockSize * sizeof(float); i += 32) {
      const __m256i bits = load_bits(x + i);
      const __m256i flip = _mm256_or_si256(_mm256_srai_epi32(bits, 31), _mm256_set1_epi32(INT32_MIN));
      const __m256i keys = _mm256_xor_si256(bits, flip);
      low = _mm256_min_epu32(low, keys);
      high = _mm256_max_epu32(high, keys);
    }
    return {min_u32(low), max_u32(high)};
  }

  template <typename T>
  static __m256i int8_codes(const std::byte* x, T value, float inverse) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(load(x, value), _mm256_set1_ps(inverse)));
  }
  template <int kCount, typename T>
  static void quantize(Int8Rule, const std::byte* x, T value, const GroupCode& group, std::byte* codes) {
    constexpr std::size_t kStep = kLanes * sizeof(T);
    // Packing works within 128-bit lanes: fours of bytes lie as a0 b0 c0 d0 a1 b1 c1 d1.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (std::size_t i = 0; i < kCount; i += kBlockSize) {
      __m256i c[4];
      for (std::size_t j = 0; j < 4; ++j) c[j] = int8_codes(x + i * sizeof(T) + j * kStep, value, group.inverse);
      const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(c[0], c[1]), _mm256_packs_epi32(c[2], c[3]));
      store_bits(codes + i, _mm256_permutevar8x32_epi32(bytes, order));
    }
  }

  static __m256i codes_of(Int4Rule, __m256 values, const GroupCode& group) {
    const __m256 halves = _mm256_mul_ps(values, _mm256_set1_ps(0.5f));
    const __m256 above = _mm256_sub_ps(halves, _mm256_set1_ps(group.half_zero));
    const __m256 steps = _mm256_mul_ps(above, _mm256_set1_ps(group.inverse));
    return _mm256_cvtps_epi32(_mm256_max_ps(steps, _mm256_setzero_ps()));
  }
  static __m256i codes_of(Int4SymmetricRule, __m256 values, const GroupCode& group) {
    const __m256i codes = _mm256_cvtps_epi32(_mm256_mul_ps(values, _mm256_set1_ps(group.inverse)));
    return _mm256_and_si256(codes, _mm256_set1_epi32(15));
  }
  static __m256i codes_of(Nf4Rule, __m256 values, const GroupCode& group) {
    const __m256 fractions = _mm256_mul_ps(values, _mm256_set1_ps(group.inverse));
    __m256i codes = _mm256_setzero_si256();
    for (std::size_t i = 0; i < 15; ++i) {
      const __m256 is_above = _mm256_cmp_ps(fractions, _mm256_set1_ps(kNf4Bounds.at[i]), _CMP_GT_OQ);
      codes = _mm256_sub_epi32(codes, _mm256_castps_si256(is_above));
    }
    return codes;
  }
  template <int kCount, class Rule, typename T>
    requires(Rule::kCodeBits == 4)
  static void quantize(Rule rule, const std::byte* x, T value, const GroupCode& group, std::byte* codes) {
    constexpr std::size_t kStep = kLanes * sizeof(T);
    for (std::size_t i = 0; i < kCount / 2; i += 2 * kLanes) {
      __m256i bytes[2];
      for (std::size_t j = 0; j < 2; ++j) {
        const std::byte* at = x + i * sizeof(T) + j * kStep;
        const __m256i low = codes_of(rule, load(at, value), group);
        const __m256i high = codes_of(rule, load(at + kCount / 2 * sizeof(T), value), group);
        bytes[j] = _mm256_or_si256(low, _mm256_slli_epi32(high, 4));
      }
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bytes[0], bytes[1]), _MM_SHUFFLE(3, 1, 2, 0));
      const __m128i upper = _mm256_extracti128_si256(packed, 1);
      store_half(codes + i, _mm_packus_epi16(_mm256_castsi256_si128(packed), upper));
    }
  }

  static __m128i load_codes(const std::byte* codes) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)); }
  template <int kCount, typename T>
  static void dequantize(Int8Rule, const std::byte* codes, float scale, float, std::byte* x, T value) {
    for (std::size_t i = 0; i < kCount; i += kLanes) {
      const __m256 steps = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_codes(codes + i)));
      store(x + i * sizeof(T), _mm256_mul_ps(steps, _mm256_set1_ps(scale)), value);
    }
  }

  // What codes 0 .. 7 and 8 .. 15 decode to.
  struct Table {
    __m256 lower;
    __m256 upper;

    // Looks at the low four bits.
    __m256 operator[](__m256i codes) const {
      const __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(lower, codes), _mm256_permutevar8x32_ps(upper, codes), is_upper);
    }
  };
  template <class Rule>
  static __m256 decoded(std::size_t first, float scale, float zero) {
    const __m256 steps = _mm256_mul_ps(_mm256_loadu_ps(kLevels<Rule>.at + first), _mm256_set1_ps(scale));
    return _mm256_add_ps(_mm256_set1_ps(zero), steps);
  }
  template <int kCount, class Rule, typename T>
    requires(Rule::kCodeBits == 4)
  static void dequantize(Rule, const std::byte* codes, float scale, float zero, std::byte* x, T value) {
    const Table table = {decoded<Rule>(0, scale, zero), decoded<Rule>(8, scale, zero)};
    for (std::size_t i = 0; i < kCount / 2; i += kLanes) {
      const __m256i bytes = _mm256_cvtepu8_epi32(load_codes(codes + i));
      store(x + i * sizeof(T), table[bytes], value);
      store(x + (i + kCount / 2) * sizeof(T), table[_mm256_srli_epi32(bytes, 4)], value);
    }
  }

  template <typename T>
  static void to_floats(const std::byte* x, T value, float* out) {
    for (std::size_t i = 0; i < kBlockSize; i += kLanes) _mm256_storeu_ps(out + i, load(x + i * sizeof(T), value));
  }
  template <typename T>
  static __m256 limited(__m256 values) {
    const __m256 above = _mm256_max_ps(values, _mm256_set1_ps(-max_finite<T>()));
    return _mm256_min_ps(above, _mm256_set1_ps(max_finite<T>()));
  }
  template <typename T>
  static void from_floats(const float* in, std::byte* x, T value) {
    for (std::size_t i = 0; i < kBlockSize; i += kLanes) {
      store(x + i * sizeof(T), limited<T>(_mm256_loadu_ps(in + i)), value);
    }
  }

  // Butterflies at a distance within a register: `swapped` holds each lane's partner, `signs` -0 for the upper ones.
  static __m256 add_partners(__m256 v, __m256 swapped, __m256 signs) {
    return _mm256_add_ps(swapped, _mm256_xor_ps(v, signs));
  }
  static __m256 within(__m256 v) {
    const __m256 by1 = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
    const __m256 by2 = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
    const __m256 by4 = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
    v = add_partners(v, _mm256_permute_ps(v, _MM_SHUFFLE(2, 3, 0, 1)), by1);
    v = add_partners(v, _mm256_permute_ps(v, _MM_SHUFFLE(1, 0, 3, 2)), by2);
    return add_partners(v, _mm256_permute2f128_ps(v, v, 1), by4);
  }
  static void butterflies_of(__m256 (&v)[8]) {
    for (__m256& lanes : v) lanes = within(lanes);
    for (std::size_t distance = 1; distance < 8; distance *= 2) {
      for (std::size_t i = 0; i < 8; ++i) {
        if ((i & distance) != 0) continue;
        const __m256 sum = _mm256_add_ps(v[i], v[i + distance]);
        v[i + distance] = _mm256_sub_ps(v[i], v[i + distance]);
        v[i] = sum;
      }
    }
  }
  template <typename T>
  static void transform(const std::byte* x, T value, float* out) {
    __m256 v[8];
    for (std::size_t i = 0; i < 8; ++i) {
      v[i] = _mm256_mul_ps(load(x + i * kLanes * sizeof(T), value), _mm256_loadu_ps(kEncodeFactors.at + i * kLanes));
    }
    butterflies_of(v);
    for (std::size_t i = 0; i < 8; ++i) _mm256_storeu_ps(out + i * kLanes, v[i]);
  }
  template <typename T>
  static void transform_back(const float* in, std::byte* x, T value) {
    __m256 v[8];
    for (std::size_t i = 0; i < 8; ++i) v[i] = _mm256_loadu_ps(in + i * kLanes);
    butterflies_of(v);
    for (std::size_t i = 0; i < 8; ++i) {
      // The sum with 0 makes +0 of -0.
      const __m256 values = _mm256_mul_ps(v[i], _mm256_loadu_ps(kDecodeFactors.at + i * kLanes));
      store(x + i * kLanes * sizeof(T), limited<T>(_mm256_add_ps(values, _mm256_setzero_ps())), value);
    }
  }
};

}  // namespace

const HostLoops kAvx2Loops = {"avx2", &encode_with<Avx2>, &decode_with<Avx2>};

}  // namespace pipecomm

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
