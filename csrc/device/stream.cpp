// The host stream: one worker thread with a queue.
#include "device/stream.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"

namespace pipecomm {
namespace {

class HostEventState final : public Event::State {
 public:
  bool is_ready() const override { return ready_.load(std::memory_order_acquire); }
  void wait() const override { ready_.wait(false, std::memory_order_acquire); }
  void set_ready() {
    ready_.store(true, std::memory_order_release);
    ready_.notify_all();
  }

 private:
  std::atomic<bool> ready_{false};
};

class HostStream final : public Stream {
 public:
  explicit HostStream(std::chrono::microseconds lag = {}) : lag_(lag), worker_([this] { run(); }) {}

  ~HostStream() override {
    {
      const std::scoped_lock lock(mutex_);
      is_closing_ = true;
    }
    work_posted_.notify_one();
    worker_.join();
  }

  void enqueue(std::function<void()> work) override {
    {
      const std::scoped_lock lock(mutex_);
      queue_.push_back(std::move(work));
    }
    work_posted_.notify_one();
  }

  void copy_async(void* dst, const void* src, std::size_t nbytes) override {
    if (nbytes == 0) return;
    enqueue([=] { std::memcpy(dst, src, nbytes); });
  }

  Event record() override {
    auto state = std::make_shared<HostEventState>();
    enqueue([state] { state->set_ready(); });
    return Event(std::move(state));
  }

  void wait(const Event& event) override {
    if (!event.is_ready()) enqueue([event] { event.wait(); });
  }

  void wait_value(const Counter& counter, std::uint64_t value) override {
    enqueue([&counter, value] { wait_for(counter, value); });
  }

  Event write_value(Counter& counter, std::uint64_t value) override {
    enqueue([&counter, value] { counter.store(value); });
    return record();
  }

  bool launch(const std::function<void(void*)>&) override { return false; }

 private:
  // Nobody wakes a device that waits, so it polls: eagerly at first, then without taking the core from others.
  static void wait_for(const Counter& counter, std::uint64_t value) {
    constexpr int kNumEager = 100;
    for (int i = 0; counter.load() < value; ++i) {
      if (i < kNumEager) {
        ::sched_yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_posted_.wait(lock, [this] { return is_closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (lag_.count() > 0) std::this_thread::sleep_for(lag_);
      work();
      work = nullptr;  // what the work owned dies outside the lock
      lock.lock();
    }
  }

  const std::chrono::microseconds lag_;
  std::mutex mutex_;
  std::condition_variable work_posted_;
  std::deque<std::function<void()>> queue_;
  bool is_closing_ = false;
  std::thread worker_;  // last: it uses the members above
};

}  // namespace

bool Event::is_ready() const { return state_ == nullptr || state_->is_ready(); }

std::optional<Error> Event::error() const { return state_ == nullptr ? std::nullopt : state_->error(); }

void Event::wait() const {
  if (state_ != nullptr) state_->wait();
}

void Event::block(void* native_stream) const {
  if (state_ != nullptr) state_->block(native_stream);
}

std::shared_ptr<Stream> make_host_stream() { return std::make_shared<HostStream>(); }

std::shared_ptr<Stream> make_lagging_stream(std::chrono::microseconds lag) { return std::make_shared<HostStream>(lag); }

#ifndef PIPECOMM_HAVE_CUDA
std::shared_ptr<Stream> make_cuda_stream(int device_index) {
  throw Error(ErrorKind::not_built, "expected a build with CUDA for a stream on CUDA device " +
                                        std::to_string(device_index) +
                                        "; got one without. Build again with PIPECOMM_CUDA=on and nvcc on PATH");
}
#endif

}  // namespace pipecomm
