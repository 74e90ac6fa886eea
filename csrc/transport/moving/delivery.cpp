// The blocks and the copies.
#include "transport/moving/delivery.h"

#include <cstring>

#include "base/error.h"

namespace pipecomm {
namespace {

// Waiting for a stream under the progress lock would hold up what that stream waits for.
Block allocate_now(const std::shared_ptr<Pool>& pool, std::size_t nbytes) {
  Block block = try_allocate_block(pool, nbytes);
  if (block) return block;
  throw Error(ErrorKind::pool_exhausted, "expected " + std::to_string(nbytes) +
                                             " bytes of a pool; got none that streams do not still use; "
                                             "keep fewer messages live");
}

}  // namespace

bool Delivery::allocate(InMessage& message, const MessageHeader& header) const {
  ReceivedPart& part = message.parts.back();
  const bool goes_on_to_device =
      !header.in_slots && (message.is_direct || (message.receiver && tensor_device_.is_used()));
  if (header.in_slots) part.device = tensor_device_.side()->device->index();
  const auto& pool = goes_on_to_device ? tensor_device_.side()->pinned_pool : pool_at(part.device);
  part.block = try_allocate_block(pool, header.payload_nbytes, Growth::later);
  return static_cast<bool>(part.block);
}

void Delivery::copy(InMessage& message, std::size_t index) const {
  ReceivedPart& part = message.parts[index];
  const TensorView& target = message.receiver->targets[index];
  const std::size_t nbytes = target.nbytes();
  if (part.device == kOnHost && target.device == kOnHost) {
    std::memcpy(target.data, part.block.data(), nbytes);
    return part.block.reset();
  }
  // A device's copy from or to other memory of the host than pinned makes the caller wait, who holds the lock.
  Block pinned;
  const bool is_pinned = part.device == kOnHost && message.is_direct;
  if (part.device != target.device && !is_pinned) pinned = allocate_now(tensor_device_.side()->pinned_pool, nbytes);
  Stream& stream = slots_.stream();
  stream.wait(message.last_use);
  stream.wait(message.receiver->ready);
  if (target.device == kOnHost) {
    stream.copy_async(pinned.data(), part.block.data(), nbytes);
    stream.enqueue([to = target.data, from = pinned.data(), nbytes] { std::memcpy(to, from, nbytes); });
  } else {
    if (pinned) std::memcpy(pinned.data(), part.block.data(), nbytes);
    stream.copy_async(target.data, pinned ? pinned.data() : part.block.data(), nbytes);
  }
  message.last_use = stream.record();
  pinned.reset(message.last_use);
  part.block.reset(message.last_use);
}

void Delivery::keep(InMessage& message, const TensorView& target, std::size_t index) const {
  Block block = allocate_now(pool_at(target.device), target.nbytes());
  if (target.device == kOnHost) {
    std::memcpy(block.data(), target.data, target.nbytes());
  } else {
    slots_.stream().copy_async(block.data(), target.data, target.nbytes());
    message.last_use = slots_.stream().record();
  }
  message.parts[index].block = std::move(block);
  message.parts[index].device = target.device;
}

}  // namespace pipecomm
