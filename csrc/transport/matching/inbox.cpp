// Matching by (source, key, order).
#include "transport/matching/inbox.h"

namespace pipecomm {
namespace {

bool accepts(const TransferState& receive, int source, const MessageKey& key) {
  return (receive.peer() == source || receive.peer() == kAnySource) && receive.key == key;
}

}  // namespace

InMessagePtr Inbox::post(const TransferPtr& receive) {
  for (auto item = parked_.begin(); item != parked_.end(); ++item) {
    if (!accepts(*receive, (*item)->source, (*item)->key)) continue;
    InMessagePtr message = *item;
    parked_.erase(item);
    return message;
  }
  posted_.push_back(receive);
  return nullptr;
}

bool Inbox::withdraw(const TransferPtr& receive) { return std::erase(posted_, receive) > 0; }

InMessagePtr Inbox::open(int source, const MessageHeader& header, bool has_gone) {
  auto message = std::make_shared<InMessage>();
  message->source = source;
  message->key = header.key;
  message->num_parts = header.num_parts;
  message->seq = header.seq;
  if (header.key.epoch < epoch_) {
    message->is_dropped = true;
    return message;
  }
  if (const TransferPtr receive = take_posted(source, header.key)) {
    message->receiver = receive;
    message->is_direct = receive->has_targets;
    receive->set_peer(source);
    return message;
  }
  // Nobody asks for anything from there: the ring holds it without a copy, and its sender feels the pressure.
  if (!expects_from(source) || (is_over_parking_limit() && !has_gone)) return nullptr;
  parked_.push_back(message);
  return message;
}

TransferPtr Inbox::rematch(const InMessagePtr& message) {
  if (TransferPtr receive = take_posted(message->source, message->key)) return receive;
  parked_.push_front(message);
  return nullptr;
}

TransferPtr Inbox::take_posted(int source, const MessageKey& key) {
  for (auto item = posted_.begin(); item != posted_.end(); ++item) {
    if (!accepts(**item, source, key)) continue;
    TransferPtr receive = *item;
    posted_.erase(item);
    return receive;
  }
  return nullptr;
}

std::vector<TransferPtr> Inbox::begin_epoch(std::uint32_t epoch, Iteration iteration) {
  epoch_ = epoch;
  iteration_ = iteration;
  std::erase_if(parked_, [&](const InMessagePtr& message) {
    if (message->key.epoch >= epoch) return false;
    message->is_dropped = true;
    message->drop_blocks();
    return true;
  });
  return take_if([&](const TransferState& receive) { return receive.key.epoch < epoch; });
}

void Inbox::lose(int source, std::uint64_t arrived, const Error& error) {
  for (const InMessagePtr& message : parked_) {
    if (message->source != source || message->slot_end <= arrived) continue;
    message->is_dropped = true;
    message->error = error;
    message->drop_blocks();
  }
}

std::string Inbox::describe() const {
  std::string text;
  for (const TransferPtr& receive : posted_) text += describe_pending(*receive);
  for (const InMessagePtr& message : parked_) {
    text += "  message from rank " + std::to_string(message->source) + " (" +
            describe_key(message->key, iteration(message->key.epoch)) + ") of " + std::to_string(message->payload) +
            " bytes, that no receive asks for\n";
  }
  const std::string parking = describe_parking();
  return parking.empty() ? text : text + "  " + parking + "\n";
}

std::string Inbox::describe_parking() const {
  if (!is_over_parking_limit()) return "";
  return std::to_string(parked_.size()) + " messages that no receive asks for are parked (" +
         std::to_string(parked_nbytes()) + " bytes), which is all that may be (" + std::to_string(max_parked_nbytes_) +
         " bytes): nothing more is taken until some are received; receive in about the order of sending, or send less "
         "ahead";
}

bool Inbox::expects_from(int source) const {
  for (const TransferPtr& receive : posted_) {
    if (receive->peer() == source || receive->peer() == kAnySource) return true;
  }
  return false;
}

std::size_t Inbox::parked_nbytes() const {
  std::size_t total = 0;
  for (const InMessagePtr& message : parked_) total += message->payload;
  return total;
}

}  // namespace pipecomm
