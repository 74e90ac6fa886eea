// What both launchers share: how many blocks, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "codec/kernel_choice.h"
#include "codec/kernels.cuh"

namespace pipecomm {

// Enough blocks to fill any current GPU; larger runs loop.
inline unsigned num_blocks(const RunLayout& run) {
  constexpr std::int64_t kMaxBlocks = 1 << 16;
  const std::int64_t teams_per_block = kBlockThreads / (unit_size(run) / kPerLane);
  return static_cast<unsigned>(std::min(kMaxBlocks, (run.num_groups + teams_per_block - 1) / teams_per_block));
}

// `arguments` as the kernel has them.
template <typename... Parameters>
void launch(const char* what, void (*kernel)(Parameters...), const RunLayout& run, void* stream,
            std::type_identity_t<Parameters>... arguments) {
  void* pointers[] = {&arguments...};
  const cudaError_t error = cudaLaunchKernel(kernel, dim3(num_blocks(run)), dim3(kBlockThreads), pointers, 0,
                                             static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return;
  throw Error(ErrorKind::cuda, std::string("expected to launch ") + what + "; got " + cudaGetErrorString(error));
}

// The first launch of a kernel may wait for all that is enqueued on the device; one that has been loaded does not.
template <typename Kernel>
void load(Kernel* kernel) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error == cudaSuccess) return;
  throw Error(ErrorKind::cuda, std::string("expected to load a kernel of a codec; got ") + cudaGetErrorString(error));
}

}  // namespace pipecomm
