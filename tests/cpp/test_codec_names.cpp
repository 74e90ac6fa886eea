// Codec names and their fields on the wire.
#include <string>

#include "check.h"
#include "codec/codec.h"

namespace pipecomm {
namespace {

TEST(codec_names_are_read_and_written_back_in_canonical_form) {
  const std::pair<const char*, const char*> names[] = {
      {"raw", "raw"},
      {"int8", "int8"},
      {"int8:group=64", "int8"},
      {"int8:group=32", "int8:group=32"},
      {"int8:group=128", "int8:group=128"},
      {"int4", "int4"},
      {"int4:group=32", "int4"},
      {"int4-symmetric:group=64", "int4-symmetric"},
      {"fp8:group=64", "fp8"},
      {"fp8:group=32", "fp8:group=32"},
      {"nf4", "nf4"},
      {"int8:rounding=nearest", "int8"},
      {"int4:hadamard=64", "int4:hadamard=64"},
      {"int8:hadamard=64,group=32", "int8:group=32,hadamard=64"},
      {"int4:spikes=1", "int4:spikes=1"},
      {"int8:rounding=stochastic,spikes=4,group=128", "int8:group=128,spikes=4,rounding=stochastic"},
      {"int4:seed=0,rounding=stochastic", "int4:rounding=stochastic"},
      {"int4:group=32,hadamard=64,rounding=stochastic", "int4:hadamard=64,rounding=stochastic"},
      {"int8:seed=18446744073709551615,rounding=stochastic,group=128",
       "int8:group=128,rounding=stochastic,seed=18446744073709551615"}};
  for (const auto& [text, canonical] : names) {
    const CodecSpec spec = parse_codec(text);
    CHECK_EQ(codec_to_string(spec), std::string(canonical));
    CHECK(parse_codec(canonical) == spec);
  }
}

const char* const kUnknown[] = {"",
                                "int3",
                                "INT8",
                                "int8 ",
                                "int8:",
                                "int8:group",
                                "int8:group=",
                                "int8:group=0",
                                "int8:group=-1",
                                "int8:group=48",
                                "int8:group=1",
                                "int8:group=64x",
                                "int8:group=65600",
                                "int8:group=18446744073709551616",
                                "int8:size=64",
                                "int4:group=64",
                                "raw:group=64",
                                "int8:group=64:group=64",
                                "int8:group=64,group=64",
                                "int8:group=64,",
                                "int8:,group=64",
                                "int8:hadamard=16",
                                "int8:hadamard=0",
                                "int8:hadamard=64,hadamard=64",
                                "int8:hadamard=64,group=128",
                                "int8:hadamard=64,spikes=1",
                                "int8:spikes=0",
                                "int8:spikes=3",
                                "int8:spikes=8",
                                "int8:spikes=257",
                                "int8:spikes=",
                                "int8:spikes=1,spikes=1",
                                "raw:spikes=1",
                                "raw:hadamard=64",
                                "raw:rounding=nearest,seed=1",
                                "int8:rounding=up",
                                "int8:rounding=",
                                "fp8:rounding=stochastic",
                                "nf4:rounding=stochastic",
                                "nf4:group=32",
                                "int4-symmetric:group=32",
                                "int4:seed=1",
                                "int4:rounding=stochastic,seed=-1",
                                "int4:rounding=stochastic,seed=18446744073709551616"};

TEST(unknown_codec_names_are_refused_with_the_known_ones) {
  for (const char* text : kUnknown) {
    CHECK_ERROR(ErrorKind::config, "\"raw\", \"int8\", \"int8:group=32|64|128\", \"int4\"", parse_codec(text));
  }
}

TEST(codec_fields_from_the_wire_are_known_only_if_a_name_has_them) {
  for (const char* name :
       {"raw", "int8", "int8:group=128", "int4", "int4-symmetric", "fp8:group=32", "nf4", "int4:hadamard=64",
        "int8:group=32,hadamard=64", "nf4:hadamard=64", "int4:spikes=1", "fp8:group=128,spikes=2", "nf4:spikes=4"}) {
    const CodecSpec spec = parse_codec(name);
    CHECK(codec_from_wire(wire_id(spec), spec.group_size) == spec);
  }
  int num_known = 0;
  for (int id = 0; id < 256; ++id) {
    for (const std::uint16_t size : {0, 1, 16, 32, 48, 64, 128, 256}) {
      const auto spec = codec_from_wire(static_cast<std::uint8_t>(id), size);
      if (!spec) continue;
      ++num_known;
      CHECK(parse_codec(codec_to_string(*spec)) == *spec);
    }
  }
  // raw; nine pairs of family and group size: plain and with 1, 2 and 4 spikes; seven with a transform.
  CHECK_EQ(num_known, 1 + 9 * 4 + 7);
}

TEST(floats_of_some_size_are_coded_and_all_else_passes) {
  const CodecSpec raw = parse_codec("raw"), int8 = parse_codec("int8");
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    CHECK(is_coded(int8, dtype, 64, 64));
    CHECK(!is_coded(int8, dtype, 63, 64));
    CHECK(!is_coded(raw, dtype, 64, 64));
    CHECK(carries(int8, dtype) && carries(raw, dtype));
  }
  for (const DType dtype : {DType::float64, DType::int32, DType::bool_, DType::float8_e5m2}) {
    CHECK(!is_coded(int8, dtype, 64, 0));
    CHECK(!carries(int8, dtype));
    CHECK(carries(raw, dtype));
  }
}

TEST(sizes_of_groups_give_the_bytes_of_a_tensor) {
  for (const char* name : {"int8", "int8:group=128", "int4", "int4-symmetric", "nf4", "int4:spikes=4",
                           "fp8:group=32,spikes=1", "int4:hadamard=64"}) {
    const CodecSpec spec = parse_codec(name);
    const GroupSizes sizes = group_sizes(spec);
    std::size_t nbytes = static_cast<std::size_t>(16 * sizes.num_values * sizes.code_bits / 8);
    for (const int section : sizes.section_nbytes) nbytes += 16 * static_cast<std::size_t>(section);
    CHECK_EQ(wire_nbytes(spec, {16, sizes.num_values}, 0, 16), nbytes);  // 16 groups fill every section
  }
  CHECK_ERROR(ErrorKind::config, "expected a quantizing codec", group_sizes(parse_codec("raw")));
}

TEST(rounding_and_seed_do_not_travel) {
  const CodecSpec spec = parse_codec("int8:hadamard=64,rounding=stochastic,seed=7");
  CHECK(codec_from_wire(wire_id(spec), spec.group_size) == parse_codec("int8:hadamard=64"));
}

}  // namespace
}  // namespace pipecomm

CHECK_MAIN()
