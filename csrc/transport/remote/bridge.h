// A peer on another host, played by two threads of this process, so that the link to it is like any other.
//
//   transport --ring, life line--> bridge ==TCP==> twin --ring, life line--> transport of the other rank
//
// Both rings have one size and hold the same records at the same positions. Room here is given back only when the
// receiver over there has taken the record: what fits into this ring fits into that one, so the stream never stands
// still for want of room, control messages are never held up behind a full ring, and limits hold from end to end.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "sockets/lifeline.h"
#include "transport/api/options.h"

namespace pipecomm {

class Bridge {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Takes an established connection to the twin at `endpoint`.
  Bridge(Fd stream, std::string endpoint, const FlowLimits& limits);
  ~Bridge();
  Bridge(const Bridge&) = delete;
  Bridge& operator=(const Bridge&) = delete;

  const std::string& endpoint() const;
  // The local transport's end; once.
  Lifeline take_lifeline();
  // No more is coming from the local transport: returns when the twin has all that there was, or at the deadline.
  void finish(Deadline deadline);
  // The twin has closed its end, whether or not what it said before has been passed on.
  bool has_hung_up() const;
  // Async-signal-safe.
  void forget_after_fork() noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// How long closing, or the end of the process, waits for a peer to have what was sent to it.
inline constexpr std::chrono::seconds kFinishTimeout{5};

}  // namespace pipecomm
