// The device of a communicator's tensors: found out from the first one, with pools of its memory.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "device/device.h"
#include "memory/device_memory.h"
#include "wire/message.h"

namespace pipecomm {

struct DeviceSide {
  DeviceSide(std::shared_ptr<Device> of, std::shared_ptr<Pool> memory)
      : device(std::move(of)), pool(std::move(memory)), pinned_pool(make_pinned_pool(device)) {}

  const std::shared_ptr<Device> device;
  const std::shared_ptr<Pool> pool;         // for messages without a target
  const std::shared_ptr<Pool> pinned_pool;  // for tensors on their way through the host
};

class TensorDevice {
 public:
  using Open = std::function<std::shared_ptr<Device>(int)>;

  // With a stand-in, tensors of the host count as its tensors, and `host_pool` as its memory.
  TensorDevice(std::shared_ptr<Device> stand_in, const std::shared_ptr<Pool>& host_pool, Open open_device);
  TensorDevice(const TensorDevice&) = delete;
  TensorDevice& operator=(const TensorDevice&) = delete;
  ~TensorDevice() { delete side_.load(); }

  // Any thread. Throws a tensor error where an earlier tensor was on another device; a not built or CUDA error.
  DeviceSide& open(int device_index);
  // Writes into the tensor which device it counts as lying on, and opens that.
  void set_device(TensorView& tensor) {
    if (has_stand_in()) tensor.device = stand_in_->index();
    if (tensor.device != kOnHost) open(tensor.device);
  }
  // As Communicator::use_device().
  std::shared_ptr<Device> use(int device_index);
  bool is_used() const { return is_used_.load(); }
  // nullptr before the first open().
  DeviceSide* side() const { return side_.load(); }
  bool has_stand_in() const { return stand_in_ != nullptr; }

 private:
  const std::shared_ptr<Device> stand_in_;
  const Open open_device_;
  std::mutex mutex_;
  std::atomic<DeviceSide*> side_{nullptr};
  std::atomic<bool> is_used_{false};
};

}  // namespace pipecomm
