// A cudaEvent_t as the state of an Event.
#pragma once

#include "device/cuda_call.h"
#include "device/stream.h"

namespace pipecomm {

class CudaEventState final : public Event::State {
 public:
  // Records it; `stream` is one of the current device.
  CudaEventState(cudaStream_t stream, int device_index) : device_index_(device_index) {
    check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags", device_index);
    if (const cudaError_t status = cudaEventRecord(event_, stream); status != cudaSuccess) {
      cudaEventDestroy(event_);
      check_cuda(status, "cudaEventRecord", device_index);
    }
  }
  ~CudaEventState() override { cudaEventDestroy(event_); }
  CudaEventState(const CudaEventState&) = delete;
  CudaEventState& operator=(const CudaEventState&) = delete;

  // Any other error means that the device or the runtime is gone, so that nothing runs before the point any more.
  bool is_ready() const override {
    const CaptureGuard guard;
    const bool is_pending = cudaEventQuery(event_) == cudaErrorNotReady;
    cudaGetLastError();
    return !is_pending;
  }
  void wait() const override {
    const CaptureGuard guard;
    check_cuda(cudaEventSynchronize(event_), "cudaEventSynchronize", device_index_);
  }
  // The default stream is that of the current device.
  void block(void* native_stream) const override {
    const DeviceGuard guard(device_index_);
    check_cuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(native_stream), event_, 0), "cudaStreamWaitEvent",
               device_index_);
  }

 private:
  cudaEvent_t event_ = nullptr;
  int device_index_;
};

}  // namespace pipecomm
