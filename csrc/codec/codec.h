// Runs of a tensor to wire bytes and back, on the host.
#pragma once

#include <cstdint>

#include "base/api.h"
#include "base/dtype.h"
#include "codec/codec_name.h"
#include "codec/runs.h"

namespace pipecomm {

// Quantizing codecs and float32, float16, bfloat16 only; raw is a plain copy.
// `src` and `dst` point at the tensor's first element, `wire` at the run's first byte; no alignment is needed.
// `sequence` changes the noise of stochastic rounding from message to message.
PC_API void encode(const CodecSpec& spec, DType dtype, const void* src, const Grid& grid, std::int64_t group_begin,
                   std::int64_t group_end, void* wire, std::uint64_t sequence = 0);
PC_API void decode(const CodecSpec& spec, DType dtype, const void* wire, const Grid& grid, std::int64_t group_begin,
                   std::int64_t group_end, void* dst);

}  // namespace pipecomm
