// Sizes and chunks of the codecs, and that every instruction set gives the same bytes.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "bytes.h"
#include "check.h"
#include "codec/codec.h"
#include "codec/host.h"
#include "codec/rules.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pipecomm {
namespace {

using check::Bytes;

const char* const kCodecs[] = {"int8",
                               "int8:group=32",
                               "int8:group=128",
                               "int4",
                               "int4-symmetric",
                               "fp8",
                               "fp8:group=32",
                               "fp8:group=128",
                               "nf4",
                               "int8:hadamard=64",
                               "int8:group=32,hadamard=64",
                               "int4:hadamard=64",
                               "int4-symmetric:hadamard=64",
                               "fp8:group=32,hadamard=64",
                               "nf4:hadamard=64",
                               "int8:group=128,rounding=stochastic,seed=3",
                               "int4:rounding=stochastic",
                               "int4-symmetric:rounding=stochastic",
                               "int4:hadamard=64,rounding=stochastic",
                               "int8:group=32,spikes=4",
                               "int8:group=128,spikes=1",
                               "int4:spikes=2",
                               "int4-symmetric:spikes=1,rounding=stochastic",
                               "fp8:spikes=2",
                               "nf4:spikes=4"};
const DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16};
const Grid kGrids[] = {{1, 1}, {1, 32}, {3, 7}, {2, 129}, {5, 96}, {15, 771}, {4, 256}, {300, 1}, {0, 64}, {5, 0}};

std::size_t size_of(std::int64_t count) { return static_cast<std::size_t>(count); }

std::string text_of(const char* codec, DType dtype, const Grid& grid) {
  return std::string(codec) + " " + dtype_name(dtype) + " [" + std::to_string(grid.rows) + ", " +
         std::to_string(grid.cols) + "]";
}

// Every bit pattern is as likely as any other in half of the groups; the rest are ordinary numbers.
void fill(Bytes& values, DType dtype, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  dispatch_float(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::size_t i = 0; (i + 1) * sizeof(T) <= values.nbytes(); ++i) {
      const auto bits = static_cast<std::uint32_t>(random());
      T value = from_float<T>(normal(random));
      if (i / 64 % 2 == 1) std::memcpy(&value, &bits, sizeof(T));
      std::memcpy(values.data() + i * sizeof(T), &value, sizeof(T));
    }
  });
}

std::vector<float> round_trip(const char* codec, const std::vector<float>& x) {
  const CodecSpec spec = parse_codec(codec);
  const Grid grid{1, static_cast<std::int64_t>(x.size())};
  const std::int64_t all = num_groups(spec, grid);
  std::vector<std::byte> wire(wire_nbytes(spec, grid, 0, all));
  std::vector<float> decoded(x.size());
  encode(spec, DType::float32, x.data(), grid, 0, all, wire.data());
  decode(spec, DType::float32, wire.data(), grid, 0, all, decoded.data());
  return decoded;
}

TEST(wire_nbytes_is_padded_scales_then_codes) {
  const CodecSpec int8 = parse_codec("int8");
  const CodecSpec int4 = parse_codec("int4");
  CHECK_EQ(wire_nbytes(int8, {1, 64}, 0, 1), 16u + 64u);
  CHECK_EQ(wire_nbytes(int8, {9, 64}, 0, 9), 32u + 9u * 64u);
  CHECK_EQ(wire_nbytes(int8, {3, 771}, 0, 39), 80u + 3u * 771u);
  CHECK_EQ(wire_nbytes(int4, {1, 5}, 0, 1), 16u + 16u + 3u);
  CHECK_EQ(wire_nbytes(int4, {3, 771}, 0, 75), 2u * 160u + 3u * (24u * 16u + 2u));
  CHECK_EQ(wire_nbytes(int4, {3, 771}, 24, 26), 16u + 16u + 2u + 16u);
  CHECK_EQ(wire_nbytes(parse_codec("int4-symmetric"), {2, 70}, 0, 4), 16u + 2u * (32u + 3u));
  CHECK_EQ(wire_nbytes(parse_codec("nf4"), {2, 64}, 0, 2), 16u + 2u * 32u);
  CHECK_EQ(wire_nbytes(parse_codec("fp8:group=128"), {1, 200}, 0, 2), 16u + 200u);
  CHECK_EQ(wire_nbytes(parse_codec("int4:hadamard=64"), {3, 771}, 0, 75), wire_nbytes(int4, {3, 771}, 0, 75));
  CHECK_EQ(wire_nbytes(parse_codec("int4:spikes=1"), {1, 288}, 0, 9), 2u * 32u + 32u + 16u + 9u * 16u);
  CHECK_EQ(wire_nbytes(parse_codec("nf4:spikes=4"), {2, 70}, 0, 4), 16u + 32u + 16u + 2u * (32u + 3u));
  CHECK_EQ(wire_nbytes(parse_codec("int8:spikes=2"), {0, 64}, 0, 0), 0u);
  CHECK_EQ(wire_nbytes(int8, {0, 64}, 0, 0), 0u);
  CHECK_EQ(wire_nbytes(int8, {5, 0}, 0, 0), 0u);
}

TEST(sizes_beyond_two_to_the_31_are_counted_in_64_bits) {
  const CodecSpec int4 = parse_codec("int4");
  const Grid grid{3, std::int64_t{1} << 32};
  const std::int64_t all = num_groups(int4, grid);
  CHECK_EQ(all, std::int64_t{3} << 27);
  CHECK_EQ(wire_nbytes(int4, grid, 0, all), (std::size_t{3} << 31) + (std::size_t{3} << 29));
  const RunLayout last = run_layout(int4, grid, all - 1, all);
  CHECK_EQ(last.group(0).element, 3 * grid.cols - 32);
}

TEST(runs_and_shapes_that_cannot_be_are_refused) {
  const CodecSpec int8 = parse_codec("int8");
  CHECK_ERROR(ErrorKind::tensor, "got [0, 2)", wire_nbytes(int8, {1, 64}, 0, 2));
  CHECK_ERROR(ErrorKind::tensor, "within 1 groups", wire_nbytes(int8, {1, 64}, -1, 1));
  CHECK_ERROR(ErrorKind::tensor, "got [1, 0)", wire_nbytes(int8, {1, 64}, 1, 0));
  CHECK_ERROR(ErrorKind::tensor, "extents >= 0", num_groups(int8, {-1, 64}));
  CHECK_ERROR(ErrorKind::tensor, "2^60", num_groups(int8, {std::int64_t{1} << 40, std::int64_t{1} << 40}));
  CHECK_ERROR(ErrorKind::config, "quantizing codec; got raw", num_groups(parse_codec("raw"), {1, 64}));
  const CodecSpec transformed = parse_codec("int4:hadamard=64");
  CHECK_ERROR(ErrorKind::tensor, "whole transform blocks; got [1, 4)", wire_nbytes(transformed, {2, 96}, 1, 4));
  CHECK_ERROR(ErrorKind::tensor, "whole transform blocks; got [0, 4)", wire_nbytes(transformed, {2, 96}, 0, 4));
  // Rows of 96 have three groups: the last is a block of its own.
  CHECK_EQ(wire_nbytes(transformed, {2, 96}, 2, 3), 16u + 16u + 16u);
  float value = 0.0f;
  std::byte wire[64];
  CHECK_ERROR(ErrorKind::tensor, "got int64", (encode(int8, DType::int64, &value, {1, 1}, 0, 1, wire), 0));
}

// The next place after `end` where a run may end.
std::int64_t next_end(const CodecSpec& spec, const Grid& grid, std::int64_t end) {
  const std::int64_t per_row = (grid.cols + spec.group_size - 1) / spec.group_size;
  const std::int64_t per_block = spec.has_transform ? 64 / spec.group_size : 1;
  return end + std::min(per_block, per_row - end % per_row);
}

TEST(groups_that_fit_is_the_longest_run_within_the_capacity) {
  for (const char* codec : kCodecs) {
    const CodecSpec spec = parse_codec(codec);
    for (const Grid& grid : kGrids) {
      const std::int64_t all = num_groups(spec, grid);
      for (std::int64_t begin = 0, next = 0; begin < all; begin = next) {
        next = groups_that_fit(spec, grid, begin, 300);
        for (const std::size_t capacity : {std::size_t{0}, std::size_t{176}, std::size_t{1000}, SIZE_MAX}) {
          const std::int64_t end = groups_that_fit(spec, grid, begin, capacity);
          CHECK(end >= begin && end <= all);
          CHECK(capacity < 176 || end > begin);
          CHECK(end == begin || wire_nbytes(spec, grid, begin, end) <= capacity);
          CHECK(end == all || wire_nbytes(spec, grid, begin, next_end(spec, grid, end)) > capacity);
        }
      }
    }
  }
}

TEST(chunks_are_self_contained_and_decode_to_what_the_whole_decodes_to) {
  for (const char* codec : kCodecs) {
    const CodecSpec spec = parse_codec(codec);
    for (const Grid& grid : kGrids) {
      const std::int64_t all = num_groups(spec, grid);
      const std::size_t nbytes = size_of(grid.rows * grid.cols) * 2;
      Bytes x(nbytes), expected(nbytes), got(nbytes);
      fill(x, DType::bfloat16, 1);
      Bytes whole(wire_nbytes(spec, grid, 0, all));
      encode(spec, DType::bfloat16, x.data(), grid, 0, all, whole.data());
      decode(spec, DType::bfloat16, whole.data(), grid, 0, all, expected.data());
      for (std::int64_t begin = 0, end = 0; begin < all; begin = end) {
        end = groups_that_fit(spec, grid, begin, 400);
        Bytes chunk(wire_nbytes(spec, grid, begin, end));
        encode(spec, DType::bfloat16, x.data(), grid, begin, end, chunk.data());
        decode(spec, DType::bfloat16, chunk.data(), grid, begin, end, got.data());
        CHECK(chunk.guards_are_untouched());
      }
      CHECK(got == expected);
      CHECK(got.guards_are_untouched() && whole.guards_are_untouched());
    }
  }
}

const HostLoops* const kPortable = usable_host_loops().front();

void check_isa(const HostLoops& loops, const char* codec, DType dtype, const Grid& grid, std::size_t offset) {
  const CodecSpec spec = parse_codec(codec);
  const RunLayout run = run_layout(spec, grid, 0, num_groups(spec, grid));
  const std::size_t nbytes = size_of(grid.rows * grid.cols) * dtype_nbytes(dtype);
  Bytes x(nbytes, offset), expected_x(nbytes, offset), got_x(nbytes, offset);
  Bytes expected(size_of(run.nbytes), offset), got(size_of(run.nbytes), offset), noise(size_of(run.nbytes), offset);
  fill(x, dtype, 2);
  fill(noise, DType::float32, 3);
  kPortable->encode(spec, dtype, run, 5, x.data(), expected.data());
  loops.encode(spec, dtype, run, 5, x.data(), got.data());
  const std::string where = std::string(loops.name) + " " + text_of(codec, dtype, grid);
  if (!(got == expected) || !got.guards_are_untouched()) check::fail(__FILE__, __LINE__, "encode " + where);
  for (const Bytes* wire : {&expected, &noise}) {
    kPortable->decode(spec, dtype, run, wire->data(), expected_x.data());
    loops.decode(spec, dtype, run, wire->data(), got_x.data());
    if (!(got_x == expected_x) || !got_x.guards_are_untouched()) check::fail(__FILE__, __LINE__, "decode " + where);
  }
}

TEST(every_instruction_set_gives_the_same_bytes) {
  for (const HostLoops* loops : usable_host_loops()) {
    for (const char* codec : kCodecs) {
      for (const DType dtype : kDTypes) {
        for (const Grid& grid : kGrids) check_isa(*loops, codec, dtype, grid, 0);
        check_isa(*loops, codec, dtype, {300, 128}, 0);
        for (const std::size_t offset : {1u, 3u, 8u, 30u}) check_isa(*loops, codec, dtype, {3, 300}, offset);
      }
    }
  }
}

// Those that go past the caches, and those of the same size that cannot: not aligned, or with ragged rows.
TEST(every_instruction_set_gives_the_same_bytes_for_large_tensors) {
  const std::pair<const char*, DType> cases[] = {{"int8", DType::float32},
                                                 {"int4", DType::bfloat16},
                                                 {"nf4", DType::float16},
                                                 {"fp8", DType::bfloat16},
                                                 {"int4:hadamard=64", DType::float16},
                                                 {"int8:spikes=1", DType::float32}};
  for (const HostLoops* loops : usable_host_loops()) {
    if (loops == kPortable) continue;
    for (const auto& [codec, dtype] : cases) {
      const auto rows = static_cast<std::int64_t>((std::size_t{17} << 20) / 4096 / dtype_nbytes(dtype));
      check_isa(*loops, codec, dtype, {rows, 4096}, 0);
    }
    check_isa(*loops, "int4", DType::float32, {1100, 4097}, 0);
    check_isa(*loops, "int4", DType::float32, {1100, 4096}, 8);
  }
}

TEST(every_instruction_set_reads_all_16_bit_patterns_alike) {
  const Grid grid{2048, 32};
  for (const char* codec : kCodecs) {
    const CodecSpec spec = parse_codec(codec);
    const RunLayout run = run_layout(spec, grid, 0, num_groups(spec, grid));
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
      Bytes x(65536 * 2), expected(size_of(run.nbytes)), got(size_of(run.nbytes));
      for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        const auto pattern = static_cast<std::uint16_t>(bits);
        std::memcpy(x.data() + bits * 2, &pattern, 2);
      }
      kPortable->encode(spec, dtype, run, 0, x.data(), expected.data());
      for (const HostLoops* loops : usable_host_loops()) {
        loops->encode(spec, dtype, run, 0, x.data(), got.data());
        CHECK(got == expected);
      }
    }
  }
}

#if defined(__x86_64__)
TEST(bytes_do_not_depend_on_the_callers_float_mode) {
  std::vector<float> x(64);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) * 1e-39f - 3e-38f;
  const unsigned before = _mm_getcsr();
  for (const char* codec : {"int8", "int4", "fp8", "nf4", "int4:hadamard=64", "int8:rounding=stochastic"}) {
    const std::vector<float> expected = round_trip(codec, x);
    // Flush to zero, denormals are zero, round upwards.
    _mm_setcsr(before | 0x8040u | 0x4000u);
    const std::vector<float> got = round_trip(codec, x);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    CHECK(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)) == 0);
    CHECK_EQ(after & 0xffc0u, (before | 0xc040u) & 0xffc0u);
  }
}
#endif

}  // namespace
}  // namespace pipecomm

CHECK_MAIN()
