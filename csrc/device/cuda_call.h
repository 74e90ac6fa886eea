// What every CUDA source needs: errors as exceptions, the current device, driver functions found at run time.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "base/error.h"

namespace pipecomm {

inline void check_cuda(cudaError_t status, const char* call, int device_index) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error is reported here; a later call must not find it again
  throw Error(ErrorKind::cuda, std::string("expected ") + call + " to succeed; got " + cudaGetErrorString(status) +
                                   " on CUDA device " + std::to_string(device_index));
}

inline void check_cuda(CUresult status, const char* call, int device_index) {
  if (status == CUDA_SUCCESS) return;
  throw Error(ErrorKind::cuda, std::string("expected ") + call + " to succeed; got CUresult " +
                                   std::to_string(static_cast<int>(status)) + " on CUDA device " +
                                   std::to_string(device_index));
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

// Calls in the scope are allowed while other threads capture graphs: none of ours belongs to a capture.
class CaptureGuard {
 public:
  CaptureGuard() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~CaptureGuard() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  CaptureGuard(const CaptureGuard&) = delete;
  CaptureGuard& operator=(const CaptureGuard&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Makes a device current for a scope and puts back what was, except a device that this process does not use: making
// it current, as device 0 is in a thread by default, would take hundreds of MiB of it for a context.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_index) {
    check_cuda(cudaGetDevice(&previous_index_), "cudaGetDevice", device_index);
    check_cuda(cudaSetDevice(device_index), "cudaSetDevice", device_index);
    if (previous_index_ == device_index) return;
    unsigned int flags = 0;
    PC_DRIVER(cuDevicePrimaryCtxGetState, device_index)(CUdevice{previous_index_}, &flags, &is_previous_used_);
  }
  ~DeviceGuard() {
    if (is_previous_used_ != 0) cudaSetDevice(previous_index_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const CaptureGuard capture_guard_;
  int previous_index_ = 0;
  int is_previous_used_ = 0;
};

// For what a destructor does: it has nobody to tell of an error.
template <typename Action>
void quietly_on(int device_index, const Action& action) noexcept {
  try {
    const DeviceGuard guard(device_index);
    action();
  } catch (const Error&) {
  }
}

}  // namespace pipecomm
