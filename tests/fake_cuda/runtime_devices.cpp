// The runtime's devices, errors and driver entry points.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "call.h"
#include "control.h"
#include "driver_table.h"
#include "forbid.h"

using fake_cuda::Call;
using fake_cuda::machine;
using fake_cuda::Needs;
using fake_cuda::require;
using fake_cuda::thread_state;

namespace {

cudaError_t result(int code) { return static_cast<cudaError_t>(code); }

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  Call call("cudaGetDeviceCount", Needs::nothing, true);
  *count = machine().num_devices;
  if (call.code() != 0) return result(call.code());
  return result(call.end(*count == 0 ? cudaErrorNoDevice : cudaSuccess));
}

cudaError_t cudaGetDevice(int* device) {
  Call call("cudaGetDevice", Needs::nothing, true);
  if (call.code() != 0) return result(call.code());
  const auto& thread = thread_state();
  *device = thread.current() == nullptr ? thread.device : thread.current()->device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  Call call("cudaSetDevice", Needs::nothing, true);
  if (call.code() != 0) return result(call.code());
  if (device < 0 || device >= machine().num_devices) return result(call.end(cudaErrorInvalidDevice));
  auto& thread = thread_state();
  thread.device = device;
  if (thread.contexts.empty()) thread.contexts.push_back(nullptr);
  thread.contexts.back() = &fake_cuda::primary_context(device);
  return result(call.end(thread.contexts.back()->error.load()));
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  Call call("cudaDeviceGetAttribute", Needs::nothing, true);
  if (call.code() != 0) return result(call.code());
  require(device >= 0 && device < machine().num_devices, "cudaDeviceGetAttribute", "the device exists");
  require(attribute == cudaDevAttrCanFlushRemoteWrites, "cudaDeviceGetAttribute",
          "the attribute is one that is known here");
  *value = 1;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  Call call("cudaGetLastError", Needs::nothing, true);
  return result(std::exchange(thread_state().last_error, 0));
}

const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  if (error == cudaErrorIllegalAddress) return "an illegal memory access was encountered";
  thread_local std::string text;
  text = "error " + std::to_string(static_cast<int>(error));
  return text.c_str();
}

// Creates the context of the thread's device where it has none.
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  Call call("cudaThreadExchangeStreamCaptureMode", Needs::thread, true);
  if (call.code() != 0) return result(call.code());
  const int before = std::exchange(thread_state().capture_mode, static_cast<int>(*mode));
  *mode = static_cast<cudaStreamCaptureMode>(before);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned int version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  Call call("cudaGetDriverEntryPointByVersion", Needs::nothing, true);
  require(version >= 12000, "cudaGetDriverEntryPointByVersion", "the version is 12.0 or later");
  *found = call.code() == 0 ? fake_cuda::find_driver_function(name) : nullptr;
  *status = *found == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return result(call.code());
}

}  // extern "C"
