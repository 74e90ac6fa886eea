// The copies to pinned memory.
#include "transport/moving/staging.h"

#include <algorithm>
#include <utility>

#include "transport/moving/way_out.h"

namespace pipecomm {
namespace {

// Messages that are copied before their turn: one leaves while the next is copied.
constexpr std::size_t kNumStaged = 2;

}  // namespace

bool Staging::run(SendQueue& queue) {
  for (std::size_t i = 0; i < std::min(queue.size(), kNumStaged);) {
    const TransferPtr transfer = queue[i];
    try {
      if (!copy(*transfer)) return i > 0;
      ++i;
    } catch (const Error& error) {  // no memory for it
      queue.remove(transfer);
      transfer->fail(error);
      transfer->release();
    }
  }
  return true;
}

bool Staging::copy(TransferState& transfer) {
  if (!transfer.is_on_device) return true;
  for (SendPart& part : transfer.to_send) {
    if (!is_on_device(part)) continue;
    DeviceSide& side = *tensor_device_.side();
    if (!stream_) stream_ = side.device->make_stream();
    Block block = try_allocate_block(side.pinned_pool, part.tensor.nbytes(), Growth::later);
    if (!block) return false;
    stream_->wait(transfer.ready);
    stream_->copy_async(block.data(), part.tensor.data, part.tensor.nbytes());
    part.tensor.data = block.data();
    part.tensor.device = kOnHost;
    transfer.staging.push_back(std::move(block));
    transfer.staged = stream_->record();
    transfer.set_event(transfer.staged);
  }
  transfer.is_on_device = false;
  return true;
}

}  // namespace pipecomm
