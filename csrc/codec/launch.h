// Starts the codec's CUDA kernels. Only built where nvcc is; a call of these without PIPECOMM_HAVE_CUDA does not link.
#pragma once

#include <cstdint>

#include "base/api.h"
#include "codec/codec.h"

namespace pipecomm {

// As encode and decode in codec.h, with device pointers of the current device and a cudaStream_t; returns at once.
// `src` and `dst` are aligned to their element, `wire` may have any alignment. Throws a cuda error if a launch fails.
PC_API void encode_cuda(const CodecSpec& spec, DType dtype, const void* src, const Grid& grid, std::int64_t group_begin,
                        std::int64_t group_end, void* wire, void* stream, std::uint64_t sequence = 0);
PC_API void decode_cuda(const CodecSpec& spec, DType dtype, const void* wire, const Grid& grid,
                        std::int64_t group_begin, std::int64_t group_end, void* dst, void* stream);

// Loads all that those launch, on the current device. Throws a cuda error.
PC_API void load_encode_kernels();
PC_API void load_decode_kernels();

}  // namespace pipecomm
