// The counts.
#include "transport/moving/flow.h"

namespace pipecomm {

void Flow::add_message(std::uint64_t end) {
  if (limits_.max_messages > 0 || has_process_limit()) message_ends_.push_back(end);
}

void Flow::update(const RingWriter& ring, std::size_t nbytes_beside) {
  if (!has_process_limit()) return;
  drop_taken(ring);
  count({message_ends_.size(), static_cast<std::size_t>(ring.published() - ring.taken()) + nbytes_beside});
}

void Flow::count(InFlight now) {
  if (now.num_messages == counted_.num_messages && now.nbytes == counted_.nbytes) return;
  InFlight& total = Progress::instance().in_flight();
  total.num_messages += now.num_messages - counted_.num_messages;
  total.nbytes += now.nbytes - counted_.nbytes;
  counted_ = now;
}

void Flow::drop_taken(const RingWriter& ring) {
  std::erase_if(message_ends_, [&](std::uint64_t end) { return end <= ring.taken(); });
}

bool Flow::is_at_process_limit() const {
  if (counted_.num_messages == 0) return false;
  const InFlight& total = Progress::instance().in_flight();
  return (limits_.max_process_messages > 0 && total.num_messages >= limits_.max_process_messages) ||
         (limits_.max_process_nbytes > 0 && total.nbytes >= limits_.max_process_nbytes);
}

bool Flow::is_at_message_limit(RingWriter& ring) {
  if (limits_.max_messages == 0) return false;
  drop_taken(ring);
  if (message_ends_.size() < limits_.max_messages) return false;
  ring.want_ring();
  drop_taken(ring);
  return message_ends_.size() >= limits_.max_messages;
}

}  // namespace pipecomm
