// Which tensors are lent, and one after the other.
#include "transport/moving/lender.h"

#include <algorithm>
#include <cstring>

namespace pipecomm {
namespace {

SourceNote note_at(const OutPart& out) {
  const std::size_t begin = static_cast<std::size_t>(out.cursor.position());
  const TensorView& tensor = out.part->tensor;
  return SourceWriter::note(static_cast<const std::byte*>(tensor.data) + begin, tensor.nbytes() - begin);
}

}  // namespace

bool Lender::lends(const SendPart& part) {
  return !part.absent && part.codec.is_raw() && part.tensor.device == kOnHost && part.tensor.nbytes() > ring_nbytes_ &&
         writer_.offer(static_cast<const std::byte*>(part.tensor.data), part.tensor.nbytes());
}

bool Lender::must_wait(const TransferState& message) {
  const auto& parts = message.to_send;
  return lent_ && std::any_of(parts.begin(), parts.end(), [this](const SendPart& part) { return lends(part); });
}

Chunk Lender::next(const OutPart& out) const {
  return out.cursor.front(out.cursor.is_at_end() ? 0 : note_at(out).nbytes);
}

void Lender::move(const OutPart& out, const Chunk&, const Event&, std::byte* record) {
  const SourceNote note = note_at(out);
  std::memcpy(record, &note, sizeof(note));
  nbytes_written_ += note.nbytes;
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
