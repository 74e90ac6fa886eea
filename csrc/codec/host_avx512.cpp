// Host loops for AVX-512 (F, BW, DQ, VL). No static initialisers: this file is loaded on every processor.
#include "codec/host.h"
#include "codec/scalar_math.h"

#if defined(__x86_64__)
#include <immintrin.h>

// GCC's own intrinsics start from registers left unset on purpose.
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"
// Without optimisation they are macros that convert.
#pragma GCC diagnostic ignored "-Wsign-conversion"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "codec/host_loops.h"

namespace pipecomm {
namespace {

// A block is two registers of 16 floats.
struct Avx512 {
  static constexpr std::size_t kLanes = 16;

  static __m256i load_half(const std::byte* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
  static __m512 load(const std::byte* x, float) { return _mm512_loadu_ps(x); }
  static __m512 load(const std::byte* x, Bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half(x)), 16));
  }
  static __m512 load(const std::byte* x, Fp16) { return _mm512_cvtph_ps(load_half(x)); }

  static void store_half(std::byte* x, __m256i values) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), values); }
  static void store(std::byte* x, __m512 values, float) { _mm512_storeu_ps(x, values); }
  // Finite values as 16-bit floats.
  static __m256i narrow(__m512 values, Bf16) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), is_odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  static __m256i narrow(__m512 values, Fp16) {
    return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  template <typename T>
  static void store(std::byte* x, __m512 values, T value) {
    store_half(x, narrow(values, value));
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

  template <typename T>
  static void quantize_int8(const std::byte* x, T value, float inverse, std::byte* codes) {
    for (std::size_t i = 0; i < kBlockSize; i += kLanes) {
      const __m512 steps = _mm512_mul_ps(load(x + i * sizeof(T), value), _mm512_set1_ps(inverse));
      const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(steps));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), bytes);
    }
  }

  static __m512i int4_codes(__m512 values, float half_zero, float inverse, float) {
    const __m512 halves = _mm512_mul_ps(values, _mm512_set1_ps(0.5f));
    const __m512 steps = _mm512_mul_ps(_mm512_sub_ps(halves, _mm512_set1_ps(half_zero)), _mm512_set1_ps(inverse));
    return _mm512_cvtps_epi32(_mm512_max_ps(steps, _mm512_setzero_ps()));
  }
  // Half of a 16-bit float is exact, so that fusing it with the subtraction changes nothing; none is below zero.
  template <typename T>
  static __m512i int4_codes(__m512 values, float half_zero, float inverse, T) {
    const __m512 above = _mm512_fmsub_ps(values, _mm512_set1_ps(0.5f), _mm512_set1_ps(half_zero));
    return _mm512_cvtps_epi32(_mm512_mul_ps(above, _mm512_set1_ps(inverse)));
  }
  template <typename T>
  static void quantize_int4(const std::byte* x, T value, float half_zero, float inverse, std::byte* codes) {
    const __m512i low = int4_codes(load(x, value), half_zero, inverse, value);
    const __m512i high = int4_codes(load(x + kLanes * sizeof(T), value), half_zero, inverse, value);
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_or_si512(low, _mm512_slli_epi32(high, 4)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), bytes);
  }

  static __m128i load_codes(const std::byte* codes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)); }
  template <typename T>
  static void dequantize_int8(const std::byte* codes, float scale, std::byte* x, T value) {
    for (std::size_t i = 0; i < kBlockSize; i += kLanes) {
      const __m512 steps = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_codes(codes + i)));
      store(x + i * sizeof(T), _mm512_mul_ps(steps, _mm512_set1_ps(scale)), value);
    }
  }

  static __m512 int4_values(__m512i codes, float scale, float zero) {
    const __m512 steps = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(scale));
    return _mm512_add_ps(_mm512_set1_ps(zero), steps);
  }
  static void dequantize_int4(const std::byte* codes, float scale, float zero, std::byte* x, float value) {
    const __m512i bytes = _mm512_cvtepu8_epi32(load_codes(codes));
    store(x, int4_values(_mm512_and_si512(bytes, _mm512_set1_epi32(15)), scale, zero), value);
    store(x + kLanes * sizeof(float), int4_values(_mm512_srli_epi32(bytes, 4), scale, zero), value);
  }
  // Looks up what each of the 16 codes decodes to, rounded once.
  template <typename T>
  static void dequantize_int4(const std::byte* codes, float scale, float zero, std::byte* x, T value) {
    const __m512i all_codes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i table = _mm512_castsi256_si512(narrow(int4_values(all_codes, scale, zero), value));
    const __m256i bytes = _mm256_cvtepu8_epi16(load_codes(codes));
    const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi16(15));
    const __m512i indices = _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_srli_epi16(bytes, 4), 1);
    _mm512_storeu_si512(x, _mm512_permutexvar_epi16(indices, table));
  }
};

}  // namespace

const HostLoops kAvx512Loops = {"avx512", &encode_with<Avx512>, &decode_with<Avx512>};

}  // namespace pipecomm

#pragma GCC diagnostic pop
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
