// Which codec: its parts, its name and its byte on the wire.
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

  bool is_raw() const { return id == CodecId::raw; }
  bool operator==(const CodecSpec&) const = default;
};

// The codec can carry a tensor of that dtype.
inline bool carries(const CodecSpec& spec, DType dtype) { return spec.is_raw() || is_quantizable(dtype); }
// Whether a tensor is coded or passes bit-exact: the one rule of C++.
inline bool is_coded(const CodecSpec& spec, DType dtype, std::size_t nbytes, std::size_t min_nbytes) {
  return !spec.is_raw() && is_quantizable(dtype) && nbytes >= min_nbytes;
}

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

}  // namespace pipecomm
