// Which tensors are lent, and one after the other.
#include "transport/moving/lender.h"

#include <algorithm>

namespace pipecomm {

bool Lender::lends(const SendPart& part) {
  return !part.absent && part.codec.id == CodecId::raw && part.tensor.device == kOnHost &&
         part.tensor.nbytes() > ring_nbytes_ &&
         sources_.offer(static_cast<const std::byte*>(part.tensor.data), part.tensor.nbytes());
}

bool Lender::must_wait(const TransferState& message) {
  const auto& parts = message.to_send;
  return lent_ && std::any_of(parts.begin(), parts.end(), [this](const SendPart& part) { return lends(part); });
}

SourceNote Lender::note(const SendPart& part, std::uint64_t position) {
  return SourceWriter::note(static_cast<const std::byte*>(part.tensor.data) + position,
                            part.tensor.nbytes() - position);
}

bool Lender::keep(std::uint64_t end, std::uint64_t seq, bool waits_for_receive, const TransferPtr& transfer) {
  if (nbytes_written_ == 0) return false;
  lent_ = {end, std::exchange(nbytes_written_, 0), seq, waits_for_receive, transfer};
  return true;
}

bool Lender::is_taken(RingWriter& ring) const {
  if (!lent_) return false;
  if (lent_->end > ring.taken()) ring.want_ring(lent_->end);
  return lent_->end <= ring.taken();
}

}  // namespace pipecomm
