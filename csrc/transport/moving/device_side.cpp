// Opens a communicator's device once.
#include "transport/moving/device_side.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace pipecomm {

TensorDevice::TensorDevice(std::shared_ptr<Device> stand_in, const std::shared_ptr<Pool>& host_pool, Open open_device)
    : stand_in_(std::move(stand_in)), open_device_(std::move(open_device)) {
  if (stand_in_) side_.store(new DeviceSide(stand_in_, host_pool ? host_pool : make_device_pool(stand_in_)));
}

DeviceSide& TensorDevice::open(int device_index) {
  const std::lock_guard lock(mutex_);
  if (side_.load() == nullptr) {
    auto device = open_device_(device_index);
    side_.store(new DeviceSide(device, make_device_pool(device)));
  }
  DeviceSide& side = *side_.load();
  if (side.device->index() == device_index) return side;
  throw Error(ErrorKind::tensor, "expected a tensor on " + side.device->name() +
                                     ", as the first one of this group; got " + "one on device " +
                                     std::to_string(device_index) +
                                     "; move it there, or make a process group for each device");
}

std::shared_ptr<Device> TensorDevice::use(int device_index) {
  if (stand_in_) device_index = stand_in_->index();
  if (device_index == kOnHost) return nullptr;
  std::shared_ptr<Device> device = open(device_index).device;
  is_used_.store(true);
  return device;
}

}  // namespace pipecomm
