// The way out of tensors that the peer reads where they lie, and when it has taken them. Progress lock only.
#pragma once

#include <optional>
#include <utility>

#include "transport/moving/way_out.h"
#include "ways/source.h"

namespace pipecomm {

class Lender final : public WayOut {
 public:
  // A message that has been written, until the peer has taken the records up to `end`.
  struct Lent {
    std::uint64_t end;
    std::size_t nbytes;
    std::uint64_t seq;
    bool waits_for_receive;  // only in strict mode
    TransferPtr transfer;
  };

  // Tensors that fit into the ring are not lent: they leave before the peer asks for them.
  Lender(std::size_t ring_nbytes, SourceWriter::Tell tell) : ring_nbytes_(ring_nbytes), writer_(std::move(tell)) {}

  // The peer can read the tensor where it lies, and is to.
  bool lends(const SendPart& part);
  // True where a message has a tensor to lend while another is lent: each is larger than what may be in flight.
  bool must_wait(const TransferState& message);

  void mark(MessageHeader& header) const override { header.at_source = true; }
  Chunk next(const OutPart& out) const override;
  std::size_t record_nbytes(const Chunk&) const override { return sizeof(SourceNote); }
  void move(const OutPart& out, const Chunk& chunk, const Event& ready, std::byte* record) override;

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
  void tell_gone() { writer_.tell_gone(); }

 private:
  const std::size_t ring_nbytes_;
  SourceWriter writer_;
  std::optional<Lent> lent_;
  std::size_t nbytes_written_ = 0;  // of the message under way
};

}  // namespace pipecomm
