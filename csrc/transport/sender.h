// The outgoing half of a link: turns posted messages into records of the peer's ring, in order. Progress lock only.
#pragma once

#include <deque>
#include <optional>

#include "transport/header.h"
#include "transport/ring.h"
#include "transport/transfer.h"

namespace pipecomm {

class Sender {
 public:
  explicit Sender(LinkEmulation emulation) : emulation_(emulation) {}

  void post(TransferPtr transfer) { queue_.push_back(std::move(transfer)); }
  bool wants_ring() const { return !queue_.empty() && !ring_; }
  void set_ring(RingWriter ring) { ring_.emplace(std::move(ring)); }
  // Writes records while there is credit; true if any was written.
  bool pump(LinkCounters& counters);
  // Takes back a message that has not begun; one that has goes on, since half a message cannot be taken back.
  void withdraw(const TransferPtr& transfer);
  // Ends unfinished messages; with `forget`, also the one under way (the peer is gone).
  template <typename Predicate>
  void fail_if(Predicate&& predicate, const Error& error, bool forget);
  // The receiver refused message number `seq`; false when it has already ended.
  bool complain(std::uint64_t seq, const Error& error);

 private:
  bool write_record(TransferState& transfer);
  MessageHeader make_header(const TransferState& transfer) const;
  std::size_t chunk_nbytes(const SendPart& part) const;
  void write_chunk(const SendPart& part, std::byte* out, std::size_t nbytes);
  RecordInfo stamp(std::size_t nbytes);
  void next_part() { ++part_index_, position_ = 0, is_part_begun_ = false; }
  bool has_begun() const { return part_index_ > 0 || is_part_begun_; }

  const LinkEmulation emulation_;
  std::deque<TransferPtr> queue_;
  std::optional<RingWriter> ring_;
  // Where the first message of the queue stands.
  std::size_t part_index_ = 0;
  bool is_part_begun_ = false;
  std::uint64_t position_ = 0;  // bytes (raw) or groups (quantized) of the part already written
  std::uint64_t first_seq_ = 0;
  std::uint64_t next_seq_ = 0;
  std::int64_t link_free_ns_ = 0;
};

template <typename Predicate>
void Sender::fail_if(Predicate&& predicate, const Error& error, bool forget) {
  std::deque<TransferPtr> kept;
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    const TransferPtr& transfer = queue_[i];
    const bool goes_on = i == 0 && has_begun() && !forget;
    if (!predicate(*transfer)) {
      kept.push_back(transfer);
      continue;
    }
    transfer->fail(error);
    if (goes_on) {
      kept.push_back(transfer);
    } else {
      transfer->release();
    }
  }
  queue_ = std::move(kept);
}

}  // namespace pipecomm
