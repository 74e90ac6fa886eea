// Whole tensors to wire bytes and back: which codec, how many bytes, encode, decode.
// A tensor is [rows, cols]: cols is its last dimension. Groups lie inside a row. A run of groups
// [group_begin, group_end), counted row by row, encodes to self-contained bytes, so that a large tensor can cross in
// chunks; the wire format of a whole tensor is the run of all its groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/api.h"
#include "base/dtype.h"

namespace pipecomm {

// Part of the wire format: append, never renumber.
enum class CodecId : std::uint8_t { raw = 0, int8 = 1, int4 = 2, int4_symmetric = 3, fp8 = 4, nf4 = 5 };

enum class Rounding : std::uint8_t { nearest, stochastic };

struct CodecSpec {
  CodecId id = CodecId::raw;
  bool has_transform = false;    // hadamard=64
  std::uint16_t group_size = 0;  // values that share a scale; 0 for raw
  std::uint8_t num_spikes = 0;   // spikes=1|2|4: values of a group that are kept beside its codes
  // Only the encoder looks at these; they do not travel.
  Rounding rounding = Rounding::nearest;
  std::uint64_t seed = 0;

  bool operator==(const CodecSpec&) const = default;
};

struct Grid {
  std::int64_t rows = 1;
  std::int64_t cols = 1;
};

// "raw", "int8:group=32", "int4:hadamard=64,rounding=stochastic,seed=7"; throws a config error that lists what is
// known.
PC_API CodecSpec parse_codec(const std::string& text);
// The same for all texts of one meaning.
PC_API std::string codec_to_string(const CodecSpec& spec);

// The byte that names the codec on the wire: its id, plus 128 with a transform, plus 32, 64 or 96 with 1, 2 or 4
// spikes.
PC_API std::uint8_t wire_id(const CodecSpec& spec);
// Nothing where the two fields name no codec that this build has.
PC_API std::optional<CodecSpec> codec_from_wire(std::uint8_t id, std::uint16_t group_size);

// The functions below take quantizing codecs and float32, float16, bfloat16 only; raw is a plain copy.
PC_API std::int64_t num_groups(const CodecSpec& spec, const Grid& grid);
PC_API std::size_t wire_nbytes(const CodecSpec& spec, const Grid& grid, std::int64_t group_begin,
                               std::int64_t group_end);
// With a transform, a run begins and ends between blocks of kTransformWidth values, or at the end of a row.
// Largest such group_end so that the run from group_begin fits `capacity_nbytes`.
PC_API std::int64_t groups_that_fit(const CodecSpec& spec, const Grid& grid, std::int64_t group_begin,
                                    std::size_t capacity_nbytes);
// `src` and `dst` point at the tensor's first element, `wire` at the run's first byte; no alignment is needed.
// `sequence` changes the noise of stochastic rounding from message to message.
PC_API void encode(const CodecSpec& spec, DType dtype, const void* src, const Grid& grid, std::int64_t group_begin,
                   std::int64_t group_end, void* wire, std::uint64_t sequence = 0);
PC_API void decode(const CodecSpec& spec, DType dtype, const void* wire, const Grid& grid, std::int64_t group_begin,
                   std::int64_t group_end, void* dst);

}  // namespace pipecomm
