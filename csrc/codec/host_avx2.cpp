// Host loops for AVX2 with F16C. No static initialisers: this file is loaded on every processor.
#include "codec/host.h"
#include "codec/scalar_math.h"

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
struct Avx2 {
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
  template <typename T>
  static void quantize_int8(const std::byte* x, T value, float inverse, std::byte* codes) {
    constexpr std::size_t kStep = kLanes * sizeof(T);
    const __m256i ab = _mm256_packs_epi32(int8_codes(x, value, inverse), int8_codes(x + kStep, value, inverse));
    const __m256i cd =
        _mm256_packs_epi32(int8_codes(x + 2 * kStep, value, inverse), int8_codes(x + 3 * kStep, value, inverse));
    // Packing works within 128-bit lanes: fours of bytes lie as a0 b0 c0 d0 a1 b1 c1 d1.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    store_bits(codes, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order));
  }

  template <typename T>
  static __m256i int4_codes(const std::byte* x, T value, float half_zero, float inverse) {
    const __m256 halves = _mm256_mul_ps(load(x, value), _mm256_set1_ps(0.5f));
    const __m256 steps = _mm256_mul_ps(_mm256_sub_ps(halves, _mm256_set1_ps(half_zero)), _mm256_set1_ps(inverse));
    return _mm256_cvtps_epi32(_mm256_max_ps(steps, _mm256_setzero_ps()));
  }
  template <typename T>
  static void quantize_int4(const std::byte* x, T value, float half_zero, float inverse, std::byte* codes) {
    constexpr std::size_t kStep = kLanes * sizeof(T);
    __m256i bytes[2];
    for (std::size_t i = 0; i < 2; ++i) {
      const __m256i low = int4_codes(x + i * kStep, value, half_zero, inverse);
      const __m256i high = int4_codes(x + (i + 2) * kStep, value, half_zero, inverse);
      bytes[i] = _mm256_or_si256(low, _mm256_slli_epi32(high, 4));
    }
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bytes[0], bytes[1]), _MM_SHUFFLE(3, 1, 2, 0));
    store_half(codes, _mm_packus_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
  }

  static __m128i load_codes(const std::byte* codes) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)); }
  template <typename T>
  static void dequantize_int8(const std::byte* codes, float scale, std::byte* x, T value) {
    for (std::size_t i = 0; i < kBlockSize; i += kLanes) {
      const __m256 steps = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_codes(codes + i)));
      store(x + i * sizeof(T), _mm256_mul_ps(steps, _mm256_set1_ps(scale)), value);
    }
  }

  static __m256 int4_values(__m256i codes, float scale, float zero) {
    const __m256 steps = _mm256_mul_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(scale));
    return _mm256_add_ps(_mm256_set1_ps(zero), steps);
  }
  template <typename T>
  static void dequantize_int4(const std::byte* codes, float scale, float zero, std::byte* x, T value) {
    for (std::size_t i = 0; i < kBlockSize / 2; i += kLanes) {
      const __m256i bytes = _mm256_cvtepu8_epi32(load_codes(codes + i));
      const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
      store(x + i * sizeof(T), int4_values(low, scale, zero), value);
      store(x + (i + kBlockSize / 2) * sizeof(T), int4_values(_mm256_srli_epi32(bytes, 4), scale, zero), value);
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
