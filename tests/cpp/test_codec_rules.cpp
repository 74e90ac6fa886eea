// The codecs' arithmetic: scales cover their groups, codes stay in range, noise is Philox, the transform inverts
// itself.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "codec/codec.h"
#include "codec/hadamard.h"
#include "codec/philox.h"
#include "codec/rules.h"

namespace pipecomm {
namespace {

std::vector<float> round_trip(const std::string& codec, const std::vector<float>& x, std::uint64_t sequence = 0) {
  const CodecSpec spec = parse_codec(codec);
  const Grid grid{1, static_cast<std::int64_t>(x.size())};
  const std::int64_t all = num_groups(spec, grid);
  std::vector<std::byte> wire(wire_nbytes(spec, grid, 0, all));
  std::vector<float> decoded(x.size());
  encode(spec, DType::float32, x.data(), grid, 0, all, wire.data(), sequence);
  decode(spec, DType::float32, wire.data(), grid, 0, all, decoded.data());
  return decoded;
}

float scale_of(const GroupCode& group) { return bits_to_float(group.scale << 16); }

// A walk over all float32 magnitudes.
template <class Rule>
void check_symmetric_codes(std::uint32_t exact_from) {
  const auto top = static_cast<std::int32_t>(Rule::kMax);
  for (std::uint32_t bits = kHalfMinScaleBits + 1; bits < kInfinityBits; bits += 0x35b1u) {
    const float largest = bits_to_float(bits);
    const GroupCode group = Rule::group(0, bits, false);
    const std::int32_t code = Rule::quantize(largest, group);
    CHECK(code <= top && Rule::quantize(-largest, group) == -code);
    const double error = std::fabs(static_cast<double>(largest) - static_cast<double>(code) * scale_of(group));
    CHECK(error <= scale_of(group) / 2.0);
    CHECK(bits < exact_from || code == top);
    const GroupCode noisy = Rule::group(0, bits, true);
    for (const float noise : {-0.49999f, 0.0f, 0.49999f}) {
      CHECK(std::abs(Rule::quantize(largest, noisy, noise)) <= top);
      CHECK(std::abs(Rule::quantize(-largest, noisy, noise)) <= top);
    }
    CHECK(static_cast<double>(scale_of(noisy)) * Rule::kMax >= largest * (1 - 1e-7));
  }
}

// Halves would lose the last bit of a subnormal step, and with it the equality with tables of decoded values.
TEST(int4_values_of_subnormal_steps_are_exact) {
  for (std::uint32_t bits = 1; bits < 64; ++bits) {
    const float step = bits_to_float(bits);
    CHECK_EQ(float_to_bits(dequantize<Int4Rule>(3.0f, step, step)), 4 * bits);
  }
  const float top = max_finite<Bf16>();
  CHECK_EQ(dequantize<Int4Rule>(15.0f, top / 7.5f, -top), top);
}

TEST(int8_codes_never_pass_127_and_the_largest_value_keeps_its_code) { check_symmetric_codes<Int8Rule>(0x04000000u); }
TEST(int4_symmetric_codes_never_pass_7) { check_symmetric_codes<Int4SymmetricRule>(0x02000000u); }

template <class Rule>
void check_scales_survive(float top) {
  for (std::uint32_t bits = kMinNormalBf16; bits < 0x7a00u; ++bits) {
    const float scale = bits_to_float(bits << 16);
    CHECK_EQ(Rule::group(0, float_to_bits(dequantize<Rule>(top, scale, 0.0f)), false).scale, bits);
  }
}

TEST(symmetric_scales_survive_a_second_trip) {
  check_scales_survive<Int8Rule>(127.0f);
  check_scales_survive<Int4SymmetricRule>(7.0f);
  check_scales_survive<Fp8Rule>(448.0f);
  check_scales_survive<Nf4Rule>(1.0f);
}

TEST(int4_scale_covers_the_group_for_any_pair_of_extremes) {
  std::mt19937 random(5);
  for (int i = 0; i < 300000; ++i) {
    const float a = bits_to_float(static_cast<std::uint32_t>(random()));
    const float b = i % 2 == 0 ? bits_to_float(static_cast<std::uint32_t>(random()))
                               : a * (1.0f + static_cast<float>(random() % 1000) * 1e-6f);
    const float limit = max_finite<Bf16>();
    if (!(std::fabs(a) <= limit) || !(std::fabs(b) <= limit)) continue;
    const float low = std::min(a, b);
    const float high = std::max(a, b);
    const GroupCode group = Int4Rule::group(float_to_bits(low), float_to_bits(high), false);
    const float zero = bits_to_float(group.zero << 16);
    CHECK(is_finite_bits(float_to_bits(scale_of(group))) && zero <= low);
    for (const float x : {low, high, low / 2 + high / 2}) {
      const std::int32_t code = Int4Rule::quantize(x, group);
      const double decoded = zero + static_cast<double>(code) * scale_of(group);
      CHECK(code >= 0 && code <= 15);
      CHECK(std::fabs(x - decoded) <= scale_of(group) * (0.5 + 1e-5));
      const std::int32_t noisy = Int4Rule::quantize(x, group, i % 2 == 0 ? 0.49999f : -0.49999f);
      CHECK(noisy >= 0 && noisy <= 15 && std::abs(noisy - code) <= 1);
    }
  }
}

TEST(values_at_the_end_of_float32_stay_finite) {
  const float top = std::numeric_limits<float>::max();
  for (const char* codec : {"int8", "int4", "int4-symmetric", "fp8", "nf4", "int8:hadamard=64", "int4:hadamard=64",
                            "nf4:hadamard=64", "int8:rounding=stochastic", "int4:hadamard=64,rounding=stochastic"}) {
    std::vector<float> alternating(64, top);
    for (std::size_t i = 0; i < 64; ++i) alternating[i] = (kTransformSigns >> i & 1u) != 0 ? -top : top;
    for (const std::vector<float>& x :
         {std::vector<float>{top, -top, 1.0f, 0.0f}, std::vector<float>(64, top), std::vector<float>(64, -top),
          std::vector<float>{-top, -top * 0.999f}, alternating}) {
      const std::vector<float> decoded = round_trip(codec, x);
      for (std::size_t i = 0; i < x.size(); ++i) {
        CHECK(std::isfinite(decoded[i]));
        CHECK(std::fabs(decoded[i] / 2 - x[i] / 2) <= top / 3);
      }
    }
  }
}

TEST(e4m3_decodes_what_it_encodes_and_rounds_to_the_nearest) {
  std::vector<float> values;
  for (std::uint32_t code = 0; code < 127; ++code) {
    values.push_back(e4m3_value(code));
    CHECK_EQ(e4m3_round(values.back()), code);
    CHECK_EQ(e4m3_round(-values.back()), code == 0 ? 0 : code | 128u);
  }
  CHECK(values[8] == 0.015625f && values[126] == 448.0f && values[1] == 0.001953125f);
  for (std::uint32_t code = 0; code + 1 < 127; ++code) {
    CHECK(values[code] < values[code + 1]);
    const float middle = (values[code] + values[code + 1]) / 2;
    CHECK_EQ(e4m3_round(middle), code + code % 2);
    CHECK_EQ(e4m3_round(std::nextafter(middle, 0.0f)), code);
    CHECK_EQ(e4m3_round(std::nextafter(middle, 1000.0f)), code + 1);
  }
}

TEST(nf4_takes_the_nearest_level) {
  const GroupCode unit = Nf4Rule::group(0, float_to_bits(1.0f), false);
  for (int i = -1000; i <= 1000; ++i) {
    const float x = static_cast<float>(i) * 1e-3f;
    const auto code = static_cast<std::uint32_t>(Nf4Rule::quantize(x, unit));
    for (std::uint32_t other = 0; other < 16; ++other) {
      CHECK(std::fabs(Nf4Rule::level(code) - x) <= std::fabs(Nf4Rule::level(other) - x) + 1e-7f);
    }
  }
}

// The known answers of Random123 (kat_vectors, philox4x32 10).
TEST(philox_gives_the_known_answers) {
  const auto is = [](const PhiloxWords& got, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
    return got.word[0] == a && got.word[1] == b && got.word[2] == c && got.word[3] == d;
  };
  CHECK(is(philox4x32({{0, 0, 0, 0}}, 0, 0), 0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u));
  CHECK(is(philox4x32({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u), 0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu));
  CHECK(is(philox4x32({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u, 0x299f31d0u), 0xd16cfe09u,
           0x94fdccebu, 0x5001e420u, 0x24126ea1u));
  const NoiseKey key{0x299f31d0a4093822u, 0x0370734413198a2eu};
  CHECK(is(key.words(0x85a308d3243f6a88u), 0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u));
}

TEST(noise_is_spread_evenly_within_half_a_step) {
  double sum = 0;
  for (std::uint32_t half = 0; half < 65536; ++half) {
    const PhiloxWords words = {{half | ~half << 16, half, 0, half << 16}};
    const float noise = noise_of(words, 0);
    CHECK(noise > -0.5f && noise < 0.5f && noise_of(words, 1) == noise && noise_of(words, 7) == noise);
    CHECK(noise_of(words, 4) == -noise);
    sum += noise;
  }
  CHECK_EQ(sum, 0.0);
}

TEST(transform_undoes_itself_and_spreads_one_value_over_the_block) {
  std::vector<float> v(64, 0.0f);
  v[5] = 64.0f;
  butterflies(v.data());
  for (const float value : v) CHECK_EQ(std::fabs(value), 64.0f);
  butterflies(v.data());
  for (std::size_t i = 0; i < 64; ++i) CHECK_EQ(v[i], i == 5 ? 4096.0f : 0.0f);
}

TEST(noise_changes_with_seed_sequence_and_element_and_not_with_chunks) {
  const std::vector<float> x(256, 0.3f);
  std::vector<float> half = x;
  half[0] = half[64] = half[128] = half[192] = 1.0f;
  const auto first = round_trip("int8:rounding=stochastic", half);
  CHECK(first == round_trip("int8:rounding=stochastic", half));
  CHECK(first != round_trip("int8:rounding=stochastic", half, 1));
  CHECK(first != round_trip("int8:rounding=stochastic,seed=1", half));
  CHECK(!std::equal(first.begin() + 1, first.begin() + 64, first.begin() + 65));
}

}  // namespace
}  // namespace pipecomm

CHECK_MAIN()
