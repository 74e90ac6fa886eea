// The CUDA stream: a non-blocking cudaStream_t. Compiles with nvcc; not yet run on a GPU.
#include <utility>

#include "device/cuda_call.h"
#include "device/cuda_event.h"
#include "device/stream.h"

namespace pipecomm {
namespace {

class CudaStream final : public Stream {
 public:
  explicit CudaStream(int device_index) : device_index_(device_index) {
    const DeviceGuard guard(device_index);
    int lowest = 0;
    int highest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange", device_index);
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority",
               device_index);
    int can_flush = 0;
    cudaDeviceGetAttribute(&can_flush, cudaDevAttrCanFlushRemoteWrites, device_index);
    wait_flags_ = CU_STREAM_WAIT_VALUE_GEQ;
    if (can_flush != 0) wait_flags_ |= CU_STREAM_WAIT_VALUE_FLUSH;
  }
  ~CudaStream() override {
    quietly_on(device_index_, [this] {
      cudaStreamSynchronize(stream_);
      cudaStreamDestroy(stream_);
    });
  }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void enqueue(std::function<void()> work) override {
    const DeviceGuard guard(device_index_);
    auto owned = std::make_unique<std::function<void()>>(std::move(work));
    check_cuda(cudaLaunchHostFunc(stream_, &run, owned.get()), "cudaLaunchHostFunc", device_index_);
    static_cast<void>(owned.release());  // run() deletes it
  }

  void copy_async(void* dst, const void* src, std::size_t nbytes) override {
    const DeviceGuard guard(device_index_);
    check_cuda(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync", device_index_);
  }

  Event record() override {
    const DeviceGuard guard(device_index_);
    return Event(std::make_shared<CudaEventState>(stream_, device_index_));
  }

  void wait(const Event& event) override {
    if (event.is_ready()) return;
    const DeviceGuard guard(device_index_);
    if (dynamic_cast<const CudaEventState*>(event.state().get()) != nullptr) {
      event.block(stream_);
    } else {
      enqueue([event] { event.wait(); });
    }
  }

  void wait_value(const Counter& counter, std::uint64_t value) override {
    const DeviceGuard guard(device_index_);
    PC_DRIVER(cuStreamWaitValue64, device_index_)(stream_, device_address(counter), value, wait_flags_);
  }

  // The driver puts a fence of the whole system before the write.
  void write_value(Counter& counter, std::uint64_t value) override {
    const DeviceGuard guard(device_index_);
    PC_DRIVER(cuStreamWriteValue64, device_index_)
    (stream_, device_address(counter), value, static_cast<unsigned int>(CU_STREAM_WRITE_VALUE_DEFAULT));
  }

  bool launch(const std::function<void(void*)>& start) override {
    const DeviceGuard guard(device_index_);
    start(stream_);
    return true;
  }

 private:
  static void run(void* work) {
    const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(work));
    (*owned)();
  }

  static CUdeviceptr device_address(const Counter& counter) { return reinterpret_cast<CUdeviceptr>(&counter); }

  int device_index_;
  unsigned int wait_flags_ = 0;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

std::shared_ptr<Stream> make_cuda_stream(int device_index) { return std::make_shared<CudaStream>(device_index); }

}  // namespace pipecomm
