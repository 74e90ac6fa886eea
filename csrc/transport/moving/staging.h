// Tensors of a device on their way through the host: copied there before their turn. Progress lock only.
#pragma once

#include <memory>

#include "transport/moving/device_side.h"
#include "transport/moving/send_queue.h"

namespace pipecomm {

class Staging {
 public:
  explicit Staging(const TensorDevice& tensor_device) : tensor_device_(tensor_device) {}

  // Copies the first messages of the queue; those without memory end, and leave it. False: streams still use the
  // memory for the first one.
  bool run(SendQueue& queue);
  bool is_used() const { return stream_ != nullptr; }

 private:
  bool copy(TransferState& transfer);

  const TensorDevice& tensor_device_;
  std::shared_ptr<Stream> stream_;
};

}  // namespace pipecomm
