// Which message goes to which receive: posted receives, parked messages, and the epoch that divides old from new.
// One per communicator; used under the progress lock.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "transport/matching/transfer.h"
#include "wire/header.h"

namespace pipecomm {

// A message that has begun to arrive.
struct InMessage {
  int source = 0;
  MessageKey key;
  std::uint16_t num_parts = 1;
  std::uint64_t seq = 0;
  TransferPtr receiver;    // none: parked, or dropped
  bool is_direct = false;  // bytes go straight into the receiver's targets
  bool is_dropped = false;
  std::optional<Error> error;  // why it was dropped, for a receive that still asks for it
  bool is_complete = false;
  std::vector<ReceivedPart> parts;
  Event last_use;              // a stream writes or reads the blocks, or the receiver's targets, until then
  std::uint64_t slot_end = 0;  // the last slot that it has told of
  std::size_t payload = 0;
  std::size_t wire = 0;
  std::int64_t started_ns = 0;

  InMessage() = default;
  InMessage(const InMessage&) = delete;
  InMessage& operator=(const InMessage&) = delete;
  ~InMessage() { drop_blocks(); }

  void drop_blocks() {
    for (ReceivedPart& part : parts) part.block.reset(last_use);
  }
};
using InMessagePtr = std::shared_ptr<InMessage>;

class Inbox {
 public:
  explicit Inbox(std::size_t max_parked_nbytes) : max_parked_nbytes_(max_parked_nbytes) {}

  // Adds a receive; gives the parked message that answers it, already taken from the parked ones, if there is one.
  InMessagePtr post(const TransferPtr& receive);
  // Takes a receive back; false when it was not waiting here.
  bool withdraw(const TransferPtr& receive);
  // Decides where an arriving message goes; nullptr: leave it in the ring for now. What is in the ring of a source that
  // has gone is all that comes: none of it is held up by the limit of what may be parked.
  InMessagePtr open(int source, const MessageHeader& header, bool has_gone);
  // A message lost its receiver: gives the next one that matches, or parks the message.
  TransferPtr rematch(const InMessagePtr& message);

  std::uint32_t epoch() const { return epoch_; }
  // Of the current epoch; that of others is not known.
  Iteration iteration(std::uint32_t epoch) const { return epoch == epoch_ ? iteration_ : std::nullopt; }
  // Drops parked messages of earlier epochs; gives the receives that waited for them.
  std::vector<TransferPtr> begin_epoch(std::uint32_t epoch, Iteration iteration);
  // Drops parked messages of a gone peer with slots beyond `arrived`, which it has not written.
  void lose(int source, std::uint64_t arrived, const Error& error);
  // Takes out and gives every posted receive for which the predicate holds.
  template <typename Predicate>
  std::vector<TransferPtr> take_if(Predicate&& predicate) {
    std::vector<TransferPtr> taken;
    std::erase_if(posted_, [&](const TransferPtr& receive) {
      if (!predicate(*receive)) return false;
      taken.push_back(receive);
      return true;
    });
    return taken;
  }
  // Receives that wait and messages that nobody has asked for, a line each.
  std::string describe() const;
  bool expects_from(int source) const;
  bool is_over_parking_limit() const { return parked_nbytes() > max_parked_nbytes_; }
  // Above the limit: how much is parked, how much may be, and what to do. Else empty.
  std::string describe_parking() const;

 private:
  TransferPtr take_posted(int source, const MessageKey& key);
  std::size_t parked_nbytes() const;

  const std::size_t max_parked_nbytes_;
  std::uint32_t epoch_ = 0;
  Iteration iteration_;
  std::deque<TransferPtr> posted_;
  std::deque<InMessagePtr> parked_;
};

}  // namespace pipecomm
