// The CUDA stream: a non-blocking cudaStream_t. Compiles with nvcc; not yet run on a GPU.
#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "base/error.h"
#include "device/stream.h"

namespace pipecomm {
namespace {

void check(cudaError_t status, const char* call, int device_index) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error is reported here; a later call must not find it again
  throw Error(ErrorKind::cuda, std::string("expected ") + call + " to succeed; got " + cudaGetErrorString(status) +
                                   " on CUDA device " + std::to_string(device_index));
}

// Makes a device current for one call and puts back what was.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_index) {
    check(cudaGetDevice(&previous_index_), "cudaGetDevice", device_index);
    check(cudaSetDevice(device_index), "cudaSetDevice", device_index);
  }
  ~DeviceGuard() { cudaSetDevice(previous_index_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_index_ = 0;
};

class CudaEventState final : public Event::State {
 public:
  CudaEventState(cudaStream_t stream, int device_index) : device_index_(device_index) {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags", device_index);
    if (const cudaError_t status = cudaEventRecord(event_, stream); status != cudaSuccess) {
      cudaEventDestroy(event_);
      check(status, "cudaEventRecord", device_index);
    }
  }
  ~CudaEventState() override { cudaEventDestroy(event_); }
  CudaEventState(const CudaEventState&) = delete;
  CudaEventState& operator=(const CudaEventState&) = delete;

  // Any other error means that the device or the runtime is gone, so that nothing runs before the point any more.
  bool is_ready() const override {
    const bool is_pending = cudaEventQuery(event_) == cudaErrorNotReady;
    cudaGetLastError();
    return !is_pending;
  }
  void wait() const override { check(cudaEventSynchronize(event_), "cudaEventSynchronize", device_index_); }
  cudaEvent_t event() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
  int device_index_;
};

class CudaStream final : public Stream {
 public:
  explicit CudaStream(int device_index) : device_index_(device_index) {
    const DeviceGuard guard(device_index);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", device_index);
  }
  ~CudaStream() override {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void enqueue(std::function<void()> work) override {
    const DeviceGuard guard(device_index_);
    auto owned = std::make_unique<std::function<void()>>(std::move(work));
    check(cudaLaunchHostFunc(stream_, &run, owned.get()), "cudaLaunchHostFunc", device_index_);
    static_cast<void>(owned.release());  // run() deletes it
  }

  void copy_async(void* dst, const void* src, std::size_t nbytes) override {
    const DeviceGuard guard(device_index_);
    check(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync", device_index_);
  }

  Event record() override {
    const DeviceGuard guard(device_index_);
    return Event(std::make_shared<CudaEventState>(stream_, device_index_));
  }

  void wait(const Event& event) override {
    if (event.is_ready()) return;
    const DeviceGuard guard(device_index_);
    if (const auto* state = dynamic_cast<const CudaEventState*>(event.state().get())) {
      check(cudaStreamWaitEvent(stream_, state->event(), 0), "cudaStreamWaitEvent", device_index_);
    } else {
      enqueue([event] { event.wait(); });
    }
  }

 private:
  static void run(void* work) {
    const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(work));
    (*owned)();
  }

  int device_index_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

std::shared_ptr<Stream> make_cuda_stream(int device_index) { return std::make_shared<CudaStream>(device_index); }

}  // namespace pipecomm
