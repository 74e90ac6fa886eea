// What is on its way to one peer, against the limits of the link and of the process. Progress lock only.
#pragma once

#include <cstdint>
#include <deque>

#include "transport/api/options.h"
#include "transport/progress/progress.h"
#include "ways/ring.h"

namespace pipecomm {

class Flow {
 public:
  explicit Flow(const FlowLimits& limits) : limits_(limits) {}
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;
  ~Flow() { forget(); }

  // The message that ends at that position of the ring is on its way.
  void add_message(std::uint64_t end);
  // Counts what the peer has not taken; `nbytes_beside` do not lie in the ring.
  void update(const RingWriter& ring, std::size_t nbytes_beside);
  // The peer is gone: nothing is on its way to it.
  void forget() { count(InFlight{}); }
  // One message at a time may always leave: what others hold must not stop a link for ever.
  bool is_at_process_limit() const;
  // Of the link's messages; the peer then rings when it has taken one.
  bool is_at_message_limit(RingWriter& ring);

 private:
  bool has_process_limit() const { return limits_.max_process_messages > 0 || limits_.max_process_nbytes > 0; }
  void count(InFlight now);
  void drop_taken(const RingWriter& ring);

  const FlowLimits& limits_;
  std::deque<std::uint64_t> message_ends_;  // in the ring, of messages not yet taken; only with a limit
  InFlight counted_;                        // in the process's total; only with a limit on that
};

}  // namespace pipecomm
