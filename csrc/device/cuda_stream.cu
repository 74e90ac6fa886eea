// The CUDA stream: a non-blocking cudaStream_t. Runs over a stand-in driver (tests/fake_cuda);
// not yet run on a GPU.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "device/cuda_address.h"
#include "device/cuda_event.h"
#include "device/cuda_guard.h"
#include "device/stream.h"

namespace pipecomm {
namespace {

// 64-bit stream memory operations, which some virtual devices do not have.
bool can_count(int device_index) {
  int value = 0;
  PC_DRIVER(cuDeviceGetAttribute, device_index)
  (&value, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, CUdevice{device_index});
  return value != 0;
}

unsigned int wait_flags(int device_index) {
  int can_flush = 0;
  check_cuda(cudaDeviceGetAttribute(&can_flush, cudaDevAttrCanFlushRemoteWrites, device_index),
             "cudaDeviceGetAttribute", device_index);
  unsigned int flags = CU_STREAM_WAIT_VALUE_GEQ;
  if (can_flush != 0) flags |= CU_STREAM_WAIT_VALUE_FLUSH;
  return flags;
}

cudaStream_t make_native(int device_index) {
  int lowest = 0;
  int highest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange", device_index);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority",
             device_index);
  return stream;
}

class CudaStream final : public Stream, public MarkedStream, public std::enable_shared_from_this<CudaStream> {
 public:
  explicit CudaStream(int device_index) : device_index_(device_index) {
    const DeviceGuard guard(device_index);
    wait_flags_ = wait_flags(device_index);
    if (can_count(device_index)) done_ = make_cuda_counter(device_index);
    stream_ = make_native(device_index);
  }
  ~CudaStream() override {
    quietly_on(device_index_, [this] { return cudaStreamSynchronize(stream_); });
    quietly_on(device_index_, [this] { return cudaStreamDestroy(stream_); });
  }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void enqueue(std::function<void()> work) override {
    auto owned = std::make_unique<std::function<void()>>(std::move(work));
    go_on([&] {
      check_cuda(cudaLaunchHostFunc(stream_, &run, owned.get()), "cudaLaunchHostFunc", device_index_);
      static_cast<void>(owned.release());  // run() deletes it
    });
  }

  void copy_async(void* dst, const void* src, std::size_t nbytes) override {
    if (nbytes == 0) return;
    go_on([&] {
      check_cuda(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync", device_index_);
    });
  }

  Event record() override {
    const DeviceGuard guard(device_index_, Calls::enqueue);
    const std::lock_guard lock(mutex_);
    if (!done_) return record_cuda_event(stream_, device_index_);
    if (!is_counted_) write(nullptr, 0);
    if (const auto last = last_.lock()) return Event(last);
    const Event event = last_cuda_event(device_index_, {done_, num_done_}, weak_from_this());
    last_ = event.state();
    return event;
  }

  void wait(const Event& event) override {
    if (event.is_ready() || is_point_of(event, done_)) return;
    if (!is_cuda_event(event)) return enqueue([event] { event.wait(); });
    prepare_cuda_event(event);
    go_on([&] { event.block(stream_); });
  }

  void wait_value(const Counter& counter, std::uint64_t value) override {
    go_on([&] {
      PC_DRIVER(cuStreamWaitValue64, device_index_)
      (stream_, device_address(device_index_, counter), value, wait_flags_);
    });
  }

  Event write_value(Counter& counter, std::uint64_t value) override {
    Event event;
    go_on([&] {
      write(&counter, value);
      event = counted_cuda_event(device_index_, {done_, num_done_});
    });
    return event;
  }

  bool launch(const std::function<void(void*)>& start) override {
    go_on([&] { start(stream_); });
    return true;
  }

  std::size_t num_pending() const override {
    if (!done_) return 0;
    const std::uint64_t num_enqueued = num_done_;
    return static_cast<std::size_t>(num_enqueued - std::min(num_enqueued, done_->load()));
  }

  void mark_last() override {
    const DeviceGuard guard(device_index_, Calls::enqueue);
    const std::lock_guard lock(mutex_);
    mark_cuda_event(last_, stream_);
  }

 private:
  static void run(void* work) {
    const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(work));
    (*owned)();
  }

  // Enqueues something; the last point gets its event before.
  template <typename Enqueue>
  void go_on(const Enqueue& enqueue_it) {
    const DeviceGuard guard(device_index_, Calls::enqueue);
    const std::lock_guard lock(mutex_);
    mark_cuda_event(last_, stream_);
    last_.reset();
    is_counted_ = false;
    enqueue_it();
  }

  // Sets the counter, if there is one, and that of the stream, in one call. The driver puts a fence of the whole system
  // before each write.
  void write(Counter* counter, std::uint64_t value) {
    CUstreamBatchMemOpParams operations[2] = {};
    unsigned int count = 0;
    const auto add = [&](CUdeviceptr address, std::uint64_t number) {
      auto& operation = operations[count++].writeValue;
      operation.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
      operation.address = address;
      operation.value64 = number;
      operation.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    };
    if (counter != nullptr) add(device_address(device_index_, *counter), value);
    add(device_address(device_index_, *done_), num_done_ + 1);
    PC_DRIVER(cuStreamBatchMemOp, device_index_)(stream_, count, operations, 0U);
    ++num_done_;
    is_counted_ = true;
  }

  const int device_index_;
  unsigned int wait_flags_ = 0;
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<Counter>
      done_;          // set by the stream, so that nobody need ask CUDA how far it is; none without 64 bits
  std::mutex mutex_;  // the rest, and the order of what is enqueued
  std::atomic<std::uint64_t> num_done_{0};
  bool is_counted_ = true;            // nothing has been enqueued since the last write of it
  std::weak_ptr<Event::State> last_;  // the point of record(), as long as nothing has been enqueued since
};

}  // namespace

std::shared_ptr<Stream> make_cuda_stream(int device_index) { return std::make_shared<CudaStream>(device_index); }

}  // namespace pipecomm
