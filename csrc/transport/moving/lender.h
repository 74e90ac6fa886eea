// The messages of a link whose tensors the peer reads where they lie, and when it has taken them. Progress lock only.
#pragma once

#include <optional>

#include "transport/matching/transfer.h"
#include "ways/ring.h"
#include "ways/source.h"

namespace pipecomm {

class Lender {
 public:
  // Where a message that has been written stands until the peer has taken the records up to `end`.
  struct Lent {
    std::uint64_t end;
    std::size_t nbytes;
    std::uint64_t seq;
    bool waits_for_receive;  // only in strict mode
    TransferPtr transfer;
  };

  // Tensors that fit into the ring are not lent: they leave before the peer asks for them.
  Lender(std::size_t ring_nbytes, SourceWriter::Tell tell) : ring_nbytes_(ring_nbytes), sources_(std::move(tell)) {}

  // The peer can read the tensor where it lies, and is to.
  bool lends(const SendPart& part);
  // True where a message has a tensor to lend while another is lent: each is larger than what may be in flight.
  bool must_wait(const TransferState& message);
  // The part's bytes from `position` on, as far as one record can tell of them.
  static SourceNote note(const SendPart& part, std::uint64_t position);
  // They are told of; they count for the message that is being written.
  void add(const SourceNote& note) { nbytes_written_ += note.nbytes; }
  // The message has been written, up to the record at `end`; false where nothing of it is lent.
  bool keep(std::uint64_t end, std::uint64_t seq, bool waits_for_receive, const TransferPtr& transfer);

  // The peer may read a tensor of this rank.
  bool is_lending() const { return lent_ || nbytes_written_ > 0; }
  std::size_t in_flight_nbytes() const { return nbytes_written_ + (lent_ ? lent_->nbytes : 0); }
  // What has been lent has been taken; until then the peer is to ring for it.
  bool is_taken(RingWriter& ring) const;
  Lent take_back() { return *std::exchange(lent_, std::nullopt); }
  // The message of that number, if it is the one that is lent.
  Lent* find(std::uint64_t seq) { return lent_ && lent_->seq == seq ? &*lent_ : nullptr; }
  const Lent* lent() const { return lent_ ? &*lent_ : nullptr; }
  // Lets the peer unmap what has gone back to the system.
  void tell_gone() { sources_.tell_gone(); }

 private:
  const std::size_t ring_nbytes_;
  SourceWriter sources_;
  std::optional<Lent> lent_;
  std::size_t nbytes_written_ = 0;
};

}  // namespace pipecomm
