// Memory for what arrives without a target, or before it has one, and the way from there to the target. Progress lock
// only.
#pragma once

#include <memory>
#include <utility>

#include "transport/matching/inbox.h"
#include "transport/moving/device_side.h"
#include "transport/moving/way_in.h"

namespace pipecomm {

class Delivery {
 public:
  // `slots` has the stream for copies on the device of this rank.
  Delivery(std::shared_ptr<Pool> pool, const TensorDevice& tensor_device, SlotWayIn& slots)
      : pool_(std::move(pool)), tensor_device_(tensor_device), slots_(slots) {}

  // Gives the last part of the message memory of its own, where its bytes arrive; false while streams use all that
  // there may be. Throws the pool's errors.
  bool allocate(InMessage& message, const MessageHeader& header) const;
  // From where the part was parked to its target.
  void copy(InMessage& message, std::size_t index) const;
  // Keeps what has come for a target that must not be written any more, in memory of the part's own.
  void keep(InMessage& message, const TensorView& target, std::size_t index) const;
  // Streams touch nothing of the tensor before `ready`.
  void wait_on_device(const Event& ready) const { slots_.stream().wait(ready); }

 private:
  const std::shared_ptr<Pool>& pool_at(int device) const {
    return device == kOnHost ? pool_ : tensor_device_.side()->pool;
  }

  const std::shared_ptr<Pool> pool_;
  const TensorDevice& tensor_device_;
  SlotWayIn& slots_;
};

}  // namespace pipecomm
