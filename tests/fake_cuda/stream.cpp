// The threads of the streams.
#include "stream.h"

#include <sched.h>

#include <chrono>
#include <random>
#include <thread>
#include <utility>

#include "control.h"

namespace fake_cuda {

namespace {

std::atomic<std::uint64_t> g_num_delays{0};

}  // namespace

std::uint64_t num_delays() { return g_num_delays.load(); }

void delay() {
  const std::size_t most = machine().max_delay_us;
  if (most == 0) return;
  thread_local std::minstd_rand random(std::random_device{}());
  if (random() % 4 != 0) return;
  g_num_delays.fetch_add(1);
  std::this_thread::sleep_for(std::chrono::microseconds(random() % most + 1));
}

void wait_for(const Context& context, const std::function<bool()>& done) {
  constexpr int kNumEager = 100;
  for (int i = 0; !done() && context.error.load() == 0; ++i) {
    if (i < kNumEager) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

void Stream::start() {
  std::thread([self = shared_from_this()] { self->run(); }).detach();
}

void Stream::push(std::function<void()> operation) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return queue_.size() < machine().queue_length || context.error.load() != 0; });
  queue_.push_back(std::move(operation));
  changed_.notify_all();
}

void Stream::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !is_busy_; });
}

std::size_t Stream::num_queued() {
  const std::lock_guard lock(mutex_);
  return queue_.size() + (is_busy_ ? 1 : 0);
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

// On a broken device nothing is done any more, and what waits there ends: operations look at the error themselves.
void Stream::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::function<void()> operation = std::move(queue_.front());
    queue_.pop_front();
    is_busy_ = true;
    changed_.notify_all();
    lock.unlock();
    delay();
    if (context.error.load() == 0) operation();
    operation = nullptr;
    lock.lock();
    is_busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace fake_cuda
