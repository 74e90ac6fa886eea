// Host loops for AVX-512 (F, BW, DQ, VL). No static initialisers: this file is loaded on every processor.
#include "codec/host.h"
#include "codec/rules.h"

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

#include "codec/avx512_ops.h"
#include "codec/host_loops.h"

namespace pipecomm {
namespace {

// -1 for the lanes whose partner lies `kDistance` before them.
constexpr SixteenFloats make_partner_signs(int distance) {
  SixteenFloats signs{};
  for (int i = 0; i < 16; ++i) signs.at[i] = (i & distance) != 0 ? -1.0f : 1.0f;
  return signs;
}
template <int kDistance>
inline constexpr SixteenFloats kPartnerSigns = make_partner_signs(kDistance);

// The transform; a block is four registers.
template <bool kStreams>
struct Avx512 : Avx512Ops<kStreams> {
  using Ops = Avx512Ops<kStreams>;

  // Butterflies at a distance within a register: `swapped` holds each lane's partner. A product with 1 or -1 is exact,
  // so fusing it with the sum changes nothing.
  template <int kDistance>
  static __m512 add_partners(__m512 v, __m512 swapped) {
    return _mm512_fmadd_ps(v, _mm512_loadu_ps(kPartnerSigns<kDistance>.at), swapped);
  }
  static __m512 within(__m512 v) {
    v = add_partners<1>(v, _mm512_permute_ps(v, _MM_SHUFFLE(2, 3, 0, 1)));
    v = add_partners<2>(v, _mm512_permute_ps(v, _MM_SHUFFLE(1, 0, 3, 2)));
    v = add_partners<4>(v, _mm512_shuffle_f32x4(v, v, _MM_SHUFFLE(2, 3, 0, 1)));
    return add_partners<8>(v, _mm512_shuffle_f32x4(v, v, _MM_SHUFFLE(1, 0, 3, 2)));
  }
  static void add_and_subtract(__m512& a, __m512& b) {
    const __m512 sum = _mm512_add_ps(a, b);
    b = _mm512_sub_ps(a, b);
    a = sum;
  }
  // Inlined: the registers of an argument by reference would pass through memory.
  [[gnu::always_inline]] static void butterflies_of(__m512 (&v)[4]) {
    for (__m512& lanes : v) lanes = within(lanes);
    add_and_subtract(v[0], v[1]);
    add_and_subtract(v[2], v[3]);
    add_and_subtract(v[0], v[2]);
    add_and_subtract(v[1], v[3]);
  }
  template <typename T>
  [[gnu::always_inline]] static void load_transformed(const std::byte* x, T value, __m512 (&v)[4]) {
    for (std::size_t i = 0; i < 2; ++i) {
      const auto values = Ops::load(x + i * kBlockSize * sizeof(T), value);
      const float* factors = kEncodeFactors.at + i * kBlockSize;
      v[2 * i] = _mm512_mul_ps(values.low, _mm512_loadu_ps(factors));
      v[2 * i + 1] = _mm512_mul_ps(values.high, _mm512_loadu_ps(factors + Ops::kLanes));
    }
    butterflies_of(v);
  }
  template <typename T>
  static void transform(const std::byte* x, T value, float* out) {
    __m512 v[4];
    load_transformed(x, value, v);
    for (std::size_t i = 0; i < 4; ++i) _mm512_storeu_ps(out + i * Ops::kLanes, v[i]);
  }
  // The smallest and largest values of all groups are folded side by side, the maxima as minima of negated values.
  template <class Isa, typename T>
  static void transform_and_scan(const std::byte* x, T value, float* out, std::uint32_t* low, std::uint32_t* high) {
    __m512 of_group[kBatchSize];
    for (std::size_t i = 0; i < kBatchSize; i += 2) {
      __m512 v[4];
      load_transformed(x + i * kBlockSize * sizeof(T), value, v);
      for (std::size_t j = 0; j < 4; ++j) _mm512_storeu_ps(out + i * kBlockSize + j * Ops::kLanes, v[j]);
      of_group[i] = folded(v[0], v[1]);
      of_group[i + 1] = folded(v[2], v[3]);
    }
    store_keys(of_group, low, high);
    // One value tells whether its block is finite: every input is in its sum.
    const __m256i firsts = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(64));
    const __mmask8 is_not_finite = _mm256_fpclass_ps_mask(_mm256_i32gather_ps(out, firsts, 4), 0x99);
    if (is_not_finite == 0) return;
    for (int g = 0; g < kBatchSize; ++g) {
      if ((is_not_finite >> (g / 2) & 1) != 0) high[g] = UINT32_MAX;
    }
  }
  // Quarters of the registers first, then halves of quarters, then neighbours.
  static void store_keys(const __m512 (&of_group)[kBatchSize], std::uint32_t* low, std::uint32_t* high) {
    __m512 of_two[8];
    for (std::size_t i = 0; i < 8; ++i) {
      of_two[i] = _mm512_min_ps(_mm512_shuffle_f32x4(of_group[i], of_group[i + 8], _MM_SHUFFLE(2, 0, 2, 0)),
                                _mm512_shuffle_f32x4(of_group[i], of_group[i + 8], _MM_SHUFFLE(3, 1, 3, 1)));
    }
    __m512 of_four[4];
    for (std::size_t i = 0; i < 4; ++i) {
      of_four[i] = _mm512_min_ps(_mm512_shuffle_ps(of_two[i], of_two[i + 4], _MM_SHUFFLE(1, 0, 1, 0)),
                                 _mm512_shuffle_ps(of_two[i], of_two[i + 4], _MM_SHUFFLE(3, 2, 3, 2)));
    }
    __m512 of_eight[2];
    for (std::size_t i = 0; i < 2; ++i) {
      of_eight[i] = _mm512_min_ps(_mm512_shuffle_ps(of_four[i], of_four[i + 2], _MM_SHUFFLE(2, 0, 2, 0)),
                                  _mm512_shuffle_ps(of_four[i], of_four[i + 2], _MM_SHUFFLE(3, 1, 3, 1)));
    }
    // Register g % 2 has group g.
    const __m512i order = _mm512_setr_epi32(0, 16, 2, 18, 1, 17, 3, 19, 8, 24, 10, 26, 9, 25, 11, 27);
    const __m512i upper = _mm512_add_epi32(order, _mm512_set1_epi32(4));
    const __m512 lows = _mm512_permutex2var_ps(of_eight[0], order, of_eight[1]);
    const __m512 highs = _mm512_permutex2var_ps(of_eight[0], upper, of_eight[1]);
    _mm512_storeu_si512(low, Ops::order_keys(_mm512_castps_si512(lows)));
    _mm512_storeu_si512(high, Ops::order_keys(_mm512_castps_si512(_mm512_xor_ps(highs, _mm512_set1_ps(-0.0f)))));
  }
  // Eight candidates for the smallest value, then eight for the negated largest.
  static __m512 folded(__m512 a, __m512 b) {
    const __m512 low = _mm512_min_ps(a, b);
    const __m512 high = _mm512_xor_ps(_mm512_max_ps(a, b), _mm512_set1_ps(-0.0f));
    return _mm512_min_ps(_mm512_shuffle_f32x4(low, high, _MM_SHUFFLE(1, 0, 1, 0)),
                         _mm512_shuffle_f32x4(low, high, _MM_SHUFFLE(3, 2, 3, 2)));
  }
  template <typename T>
  static void transform_back(const float* in, std::byte* x, T value) {
    __m512 v[4];
    for (std::size_t i = 0; i < 4; ++i) v[i] = _mm512_loadu_ps(in + i * Ops::kLanes);
    butterflies_of(v);
    for (std::size_t i = 0; i < 4; ++i) {
      // The sum with 0 makes +0 of -0; the product is exact.
      const __m512 factors = _mm512_loadu_ps(kDecodeFactors.at + i * Ops::kLanes);
      v[i] = Ops::template limited<T>(_mm512_fmadd_ps(v[i], factors, _mm512_setzero_ps()));
    }
    Ops::store(x, {v[0], v[1]}, value);
    Ops::store(x + kBlockSize * sizeof(T), {v[2], v[3]}, value);
  }
};

template <>
struct Cached<Avx512<true>> {
  using Isa = Avx512<false>;
};

// More than the caches keep until it is read; what they need not fetch first halves the traffic.
constexpr std::int64_t kStreamedNbytes = std::int64_t{16} << 20;

void decode_either_way(const CodecSpec& spec, DType dtype, const RunLayout& run, const std::byte* wire,
                       std::byte* dst) {
  const auto value_nbytes = static_cast<std::int64_t>(dtype_nbytes(dtype));
  const bool is_large = run.num_groups * run.group_size * value_nbytes >= kStreamedNbytes;
  // Then all groups are aligned, and no spike is written into what has just left.
  const bool is_plain = run.is_dense && run.num_spikes == 0 && reinterpret_cast<std::uintptr_t>(dst) % 64 == 0;
  if (!is_large || !is_plain) return decode_with<Avx512<false>>(spec, dtype, run, wire, dst);
  decode_with<Avx512<true>>(spec, dtype, run, wire, dst);
  _mm_sfence();
}

}  // namespace

const HostLoops kAvx512Loops = {"avx512", &encode_with<Avx512<false>>, &decode_either_way};

}  // namespace pipecomm

#pragma GCC diagnostic pop
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
