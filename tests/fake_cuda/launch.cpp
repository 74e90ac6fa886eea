// Launches, and the loading of kernels: "CUDA ... will delay loading of a kernel until" its first use, and "loading
// kernels might require context synchronization" (CUDA C++ Programming Guide, Lazy Loading).
#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>

#include "base/api.h"
#include "call.h"
#include "control.h"
#include "handles.h"
#include "memory.h"

namespace fake_cuda {
namespace {

std::mutex g_simt_mutex;  // the stand-in for lanes is not thread-safe

}  // namespace

PC_API cudaError_t launch(const void* kernel, cudaStream_t handle, std::function<bool(int)> run) {
  Call call("cudaLaunchKernel", Needs::context, true);
  if (call.code() != 0) return static_cast<cudaError_t>(call.code());
  const auto stream = stream_of(handle, call.context(), "cudaLaunchKernel");
  if (&stream->context != &call.context()) return static_cast<cudaError_t>(call.end(cudaErrorInvalidResourceHandle));
  if (call.context().load(kernel) && machine().loads_lazily) call.drain();
  stream->push([run = std::move(run), &context = stream->context] {
    const std::lock_guard guard(g_simt_mutex);
    if (!run(context.device)) context.error.store(cudaErrorIllegalAddress);
  });
  return cudaSuccess;
}

PC_API std::byte* find_argument(int device, const void* address) { return reach(device, address, 1, Reach::stream); }

}  // namespace fake_cuda

// Loads the kernel.
extern "C" PC_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  using namespace fake_cuda;
  Call call("cudaFuncGetAttributes", Needs::context, true);
  if (call.code() != 0) return static_cast<cudaError_t>(call.code());
  *attributes = {};
  if (call.context().load(kernel) && machine().loads_lazily) call.drain();
  return cudaSuccess;
}
