// Where a tensor lies, and its device's current stream, without a header of CUDA: they pull in many others.
// Not yet run on a GPU.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "transport/api/communicator.h"

namespace pipecomm {

inline int device_index_of(const at::Tensor& tensor) { return tensor.is_cuda() ? tensor.device().index() : kOnHost; }

// The cudaStream_t that the calling thread's work on this device goes to.
inline void* current_stream(int device_index) {
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_index));
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device).native_handle();
}

// The point that the caller's work on the tensor has reached; reached, for one on the host.
inline Event ready_of(Communicator& communicator, const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return {};
  return communicator.record(device_index_of(tensor), current_stream(device_index_of(tensor)));
}

}  // namespace pipecomm
