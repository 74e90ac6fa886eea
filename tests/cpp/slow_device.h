// The host as a device whose streams lag behind: every operation may come late, so that an order that is only right by
// luck shows. Seeded by the count of streams, so that runs are alike as far as threads allow.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "device/device.h"

class SlowStream final : public pipecomm::Stream {
 public:
  SlowStream() : random_(num_made_.fetch_add(1)) {}

  void enqueue(std::function<void()> work) override {
    lag();
    stream_->enqueue(std::move(work));
  }
  void copy_async(void* dst, const void* src, std::size_t nbytes) override {
    lag();
    stream_->copy_async(dst, src, nbytes);
  }
  pipecomm::Event record() override {
    lag();
    return stream_->record();
  }
  void wait(const pipecomm::Event& event) override { stream_->wait(event); }
  void wait_value(const pipecomm::Counter& counter, std::uint64_t value) override {
    stream_->wait_value(counter, value);
  }
  pipecomm::Event write_value(pipecomm::Counter& counter, std::uint64_t value) override {
    lag();
    return stream_->write_value(counter, value);
  }
  bool launch(const std::function<void(void*)>& start) override { return stream_->launch(start); }

 private:
  void lag() {
    std::chrono::microseconds time(0);
    {
      const std::lock_guard lock(mutex_);
      if (std::uniform_int_distribution(0, 3)(random_) == 0) {
        time = std::chrono::microseconds(std::uniform_int_distribution(1, 300)(random_));
      }
    }
    if (time.count() > 0) stream_->enqueue([time] { std::this_thread::sleep_for(time); });
  }

  static inline std::atomic<unsigned> num_made_{1};
  std::mutex mutex_;
  std::minstd_rand random_;
  std::shared_ptr<pipecomm::Stream> stream_ = pipecomm::make_host_stream();
};

inline std::shared_ptr<pipecomm::Device> slow_device() {
  return pipecomm::make_host_device([] { return std::make_shared<SlowStream>(); });
}
