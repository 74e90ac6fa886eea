// The host as a device that fails from some moment on, as a CUDA device does after an error of any kernel.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "base/error.h"
#include "device/device.h"

class FailingStream final : public pipecomm::Stream {
 public:
  explicit FailingStream(std::shared_ptr<const std::atomic<bool>> fails) : fails_(std::move(fails)) {}

  void enqueue(std::function<void()> work) override { working().enqueue(std::move(work)); }
  void copy_async(void* dst, const void* src, std::size_t nbytes) override { working().copy_async(dst, src, nbytes); }
  pipecomm::Event record() override { return working().record(); }
  void wait(const pipecomm::Event& event) override { working().wait(event); }
  void wait_value(const pipecomm::Counter& counter, std::uint64_t value) override {
    working().wait_value(counter, value);
  }
  pipecomm::Event write_value(pipecomm::Counter& counter, std::uint64_t value) override {
    return working().write_value(counter, value);
  }
  bool launch(const std::function<void(void*)>&) override { return false; }

 private:
  pipecomm::Stream& working() const {
    if (*fails_) throw pipecomm::Error(pipecomm::ErrorKind::cuda, "expected a device that works; got one that fails");
    return *stream_;
  }

  const std::shared_ptr<const std::atomic<bool>> fails_;
  const std::shared_ptr<pipecomm::Stream> stream_ = pipecomm::make_host_stream();
};

inline std::shared_ptr<pipecomm::Device> failing_device(std::shared_ptr<const std::atomic<bool>> fails) {
  return pipecomm::make_host_device([fails] { return std::make_shared<FailingStream>(fails); });
}
