// Chooses the kernel for a codec, dtype and group size, and launches it.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "codec/host.h"
#include "codec/kernels.cuh"
#include "codec/launch.h"

namespace pipecomm {
namespace {

// Enough blocks to fill any current GPU; larger runs loop.
constexpr std::int64_t kMaxBlocks = 1 << 16;

unsigned num_blocks(const RunLayout& run) {
  const std::int64_t teams_per_block = kBlockThreads / (run.group_size / kPerLane);
  return static_cast<unsigned>(std::min(kMaxBlocks, (run.num_groups + teams_per_block - 1) / teams_per_block));
}

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  throw Error(ErrorKind::cuda, std::string("expected to launch ") + what + "; got " + cudaGetErrorString(error));
}

template <typename T>
void launch_encode(CodecId codec, const RunLayout& run, const T* src, unsigned char* wire, cudaStream_t stream) {
  const unsigned blocks = num_blocks(run);
  if (codec == CodecId::int4) {
    encode_int4_kernel<T><<<blocks, kBlockThreads, 0, stream>>>(run, src, wire);
  } else if (run.group_size == 32) {
    encode_int8_kernel<T, 32><<<blocks, kBlockThreads, 0, stream>>>(run, src, wire);
  } else if (run.group_size == 64) {
    encode_int8_kernel<T, 64><<<blocks, kBlockThreads, 0, stream>>>(run, src, wire);
  } else {
    encode_int8_kernel<T, 128><<<blocks, kBlockThreads, 0, stream>>>(run, src, wire);
  }
  check_launch("the encode kernel");
}

template <typename T>
void launch_decode(CodecId codec, const RunLayout& run, const unsigned char* wire, T* dst, cudaStream_t stream) {
  const unsigned blocks = num_blocks(run);
  if (codec == CodecId::int4) {
    decode_int4_kernel<T><<<blocks, kBlockThreads, 0, stream>>>(run, wire, dst);
  } else if (run.group_size == 32) {
    decode_int8_kernel<T, 32><<<blocks, kBlockThreads, 0, stream>>>(run, wire, dst);
  } else if (run.group_size == 64) {
    decode_int8_kernel<T, 64><<<blocks, kBlockThreads, 0, stream>>>(run, wire, dst);
  } else {
    decode_int8_kernel<T, 128><<<blocks, kBlockThreads, 0, stream>>>(run, wire, dst);
  }
  check_launch("the decode kernel");
}

}  // namespace

void encode_cuda(const CodecSpec& spec, DType dtype, const void* src, const Grid& grid, std::int64_t group_begin,
                 std::int64_t group_end, void* wire, void* stream) {
  const RunLayout run = run_layout(spec, grid, group_begin, group_end);
  if (run.num_groups == 0) return;
  dispatch_float(dtype, [&](auto value) {
    using T = decltype(value);
    launch_encode(spec.id, run, static_cast<const T*>(src), static_cast<unsigned char*>(wire),
                  static_cast<cudaStream_t>(stream));
  });
}

void decode_cuda(const CodecSpec& spec, DType dtype, const void* wire, const Grid& grid, std::int64_t group_begin,
                 std::int64_t group_end, void* dst, void* stream) {
  const RunLayout run = run_layout(spec, grid, group_begin, group_end);
  if (run.num_groups == 0) return;
  dispatch_float(dtype, [&](auto value) {
    using T = decltype(value);
    launch_decode(spec.id, run, static_cast<const unsigned char*>(wire), static_cast<T*>(dst),
                  static_cast<cudaStream_t>(stream));
  });
}

}  // namespace pipecomm
