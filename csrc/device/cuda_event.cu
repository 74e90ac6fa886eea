// The states of a point: not reached, reached, or never to be reached because the device has failed.
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "device/cuda_address.h"
#include "device/cuda_event.h"
#include "device/cuda_guard.h"

namespace pipecomm {
namespace {

using Clock = std::chrono::steady_clock;
// How long a counter is read in vain before the device is asked whether it still works.
constexpr Clock::duration kPatience = std::chrono::milliseconds(2);

// Events that are used again: making and ending one are calls that wait where others do.
class EventPool {
 public:
  cudaEvent_t take(int device_index) {
    {
      const std::lock_guard lock(mutex_);
      auto& free = free_[device_index];
      if (!free.empty()) {
        const cudaEvent_t event = free.back();
        free.pop_back();
        return event;
      }
    }
    const DeviceGuard guard(device_index);
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags", device_index);
    return event;
  }
  // One that is never recorded: asked for, it gives the error of a device that has failed.
  cudaEvent_t monitor(int device_index) {
    const std::lock_guard lock(monitor_mutex_);
    cudaEvent_t& event = monitors_[device_index];
    if (event == nullptr) event = take(device_index);
    return event;
  }
  void give_back(int device_index, cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    free_[device_index].push_back(event);
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<cudaEvent_t>> free_;
  std::mutex monitor_mutex_;
  std::map<int, cudaEvent_t> monitors_;
};

EventPool& event_pool() {
  static auto* pool = new EventPool;
  return *pool;
}

class CudaEventState final : public Event::State {
 public:
  CudaEventState(cudaEvent_t event, int device_index, CounterPoint point, std::weak_ptr<MarkedStream> stream = {})
      : event_(event), device_index_(device_index), point_(std::move(point)), stream_(std::move(stream)) {}
  ~CudaEventState() override {
    if (event_ != nullptr) event_pool().give_back(device_index_, event_);
  }
  CudaEventState(const CudaEventState&) = delete;
  CudaEventState& operator=(const CudaEventState&) = delete;

  // No call of CUDA where a counter tells; now and then one that shows whether the device has failed.
  bool is_ready() const override {
    if (is_counted()) return true;
    if (status_.load() != cudaErrorNotReady) return true;
    if (point_.counter && !is_time_to_ask()) return false;
    const cudaError_t status = ask();
    if (status == cudaErrorNotReady || (status == cudaSuccess && point_.counter)) return false;
    status_.store(status);
    return true;
  }
  std::optional<Error> error() const override {
    const cudaError_t status = status_.load();
    if (is_counted() || status == cudaErrorNotReady || status == cudaSuccess) return std::nullopt;
    return cuda_error(status, "cudaEventQuery", device_index_);
  }
  void wait() const override {
    if (is_counted()) return;
    const DeviceGuard guard(device_index_);
    if (const cudaEvent_t event = event_) {
      return check_cuda(cudaEventSynchronize(event), "cudaEventSynchronize", device_index_);
    }
    while (!is_ready()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (const auto failure = error()) throw Error(*failure);
  }
  // The default stream is that of the current device.
  void block(void* native_stream) const override {
    prepare();
    if (is_counted()) return;
    const DeviceGuard guard(device_index_, Calls::enqueue);
    const auto stream = static_cast<cudaStream_t>(native_stream);
    if (const cudaEvent_t event = event_) {
      return check_cuda(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent", device_index_);
    }
    PC_DRIVER(cuStreamWaitValue64, device_index_)
    (stream, device_address(device_index_, *point_.counter), point_.value,
     static_cast<unsigned int>(CU_STREAM_WAIT_VALUE_GEQ));
  }

  void prepare() const {
    if (event_ != nullptr || is_counted()) return;
    if (const auto stream = stream_.lock()) stream->mark_last();
  }
  // Under the stream's lock.
  void mark(cudaStream_t stream) {
    if (event_ != nullptr || is_counted()) return;
    const cudaEvent_t event = event_pool().take(device_index_);
    const cudaError_t status = cudaEventRecord(event, stream);
    if (status != cudaSuccess) event_pool().give_back(device_index_, event);
    check_cuda(status, "cudaEventRecord", device_index_);
    event_ = event;
  }

  const CounterPoint& point() const { return point_; }
  bool is_counted() const { return point_.counter && point_.counter->load() >= point_.value; }

 private:
  bool is_time_to_ask() const {
    const Clock::rep now = Clock::now().time_since_epoch().count();
    Clock::rep due = due_.load();
    if (due == 0) due_.compare_exchange_strong(due, now + kPatience.count());
    return due != 0 && now >= due && due_.compare_exchange_strong(due, now + kPatience.count());
  }

  cudaError_t ask() const {
    const DeviceGuard guard(device_index_);
    const cudaEvent_t event = event_;
    const cudaError_t status = cudaEventQuery(event != nullptr ? event : event_pool().monitor(device_index_));
    cudaGetLastError();
    return status;
  }

  std::atomic<cudaEvent_t> event_;  // none: as last_cuda_event() and counted_cuda_event() say
  const int device_index_;
  const CounterPoint point_;
  const std::weak_ptr<MarkedStream> stream_;
  mutable std::atomic<cudaError_t> status_{cudaErrorNotReady};
  mutable std::atomic<Clock::rep> due_{0};
};

}  // namespace

Event record_cuda_event(cudaStream_t stream, int device_index) {
  const cudaEvent_t event = event_pool().take(device_index);
  const auto state = std::make_shared<CudaEventState>(event, device_index, CounterPoint{});
  check_cuda(cudaEventRecord(event, stream), "cudaEventRecord", device_index);
  return Event(state);
}

Event last_cuda_event(int device_index, CounterPoint point, std::weak_ptr<MarkedStream> stream) {
  return Event(std::make_shared<CudaEventState>(nullptr, device_index, std::move(point), std::move(stream)));
}

void mark_cuda_event(const std::weak_ptr<Event::State>& state, cudaStream_t stream) {
  if (const auto held = std::static_pointer_cast<CudaEventState>(state.lock())) held->mark(stream);
}

void prepare_cuda_event(const Event& event) {
  if (const auto* state = dynamic_cast<const CudaEventState*>(event.state().get())) state->prepare();
}

Event counted_cuda_event(int device_index, CounterPoint point) {
  return Event(std::make_shared<CudaEventState>(nullptr, device_index, std::move(point)));
}

bool is_cuda_event(const Event& event) { return dynamic_cast<const CudaEventState*>(event.state().get()) != nullptr; }

bool is_point_of(const Event& event, const std::shared_ptr<Counter>& counter) {
  const auto* state = dynamic_cast<const CudaEventState*>(event.state().get());
  return state != nullptr && counter && state->point().counter == counter;
}

}  // namespace pipecomm
