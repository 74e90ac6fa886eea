// What every CUDA source needs: errors as exceptions, and driver functions found at run time.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "base/error.h"

namespace pipecomm {

inline Error cuda_error(cudaError_t status, const char* call, int device_index) {
  return Error(ErrorKind::cuda, std::string("expected ") + call + " to succeed; got " + cudaGetErrorString(status) +
                                    " on CUDA device " + std::to_string(device_index));
}

inline void check_cuda(cudaError_t status, const char* call, int device_index) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error is reported here; a later call must not find it again
  throw cuda_error(status, call, device_index);
}

inline void check_cuda(CUresult status, const char* call, int device_index) {
  if (status == CUDA_SUCCESS) return;
  const bool is_exhausted = status == CUDA_ERROR_OUT_OF_MEMORY;
  throw Error(is_exhausted ? ErrorKind::pool_exhausted : ErrorKind::cuda,
              std::string("expected ") + call + " to succeed; got CUresult " +
                  std::to_string(static_cast<int>(status)) + (is_exhausted ? ", out of memory," : "") +
                  " on CUDA device " + std::to_string(device_index));
}

// A function of libcuda, which is never linked: the library loads on machines without a driver. `Function` is its type
// of CUDA 12.0, which every later driver keeps.
template <typename Function>
Function driver_function(const char* name, int device_index) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  check_cuda(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name, device_index);
  if (found == nullptr || result != cudaDriverEntryPointSuccess) {
    throw Error(ErrorKind::cuda, std::string("expected a driver of CUDA 12 or newer, with ") + name + "; got none");
  }
  return reinterpret_cast<Function>(found);
}

// One call of a driver function: PC_DRIVER(cuMemCreate, device_index)(&handle, ...).
#define PC_DRIVER(function, device_index)                                                                  \
  [&](auto... arguments) {                                                                                 \
    static const auto pointer = ::pipecomm::driver_function<decltype(&function)>(#function, device_index); \
    ::pipecomm::check_cuda(pointer(arguments...), #function, device_index);                                \
  }

}  // namespace pipecomm
