// Runs lists against a clock: the one interpretation of what each action waits for.
// Serves the checker (no time passes, is there a deadlock?) and the simulator (when does what happen?).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/api.h"
#include "schedule/lists.h"

namespace pipecomm::schedule {

// How long things take, in seconds, and how far a sender may run ahead of its receiver.
struct Timing {
  // By kind, then by stage.
  std::span<const double> compute_s;
  // By the stage that sends: how long its message keeps the channel busy, and how much later it arrives.
  std::span<const double> transfer_s[kNumDirections];
  std::span<const double> latency_s[kNumDirections];
  // Messages of a channel that may travel before their receive is posted.
  std::int64_t slots = 0;
  // Messages of a channel that may be on their way at one time; 0: any number.
  std::int64_t max_in_flight = 0;
  // A rank stands still until its message has left.
  bool sends_block = false;
};

struct Walk {
  // By rank. Empty: all lists reached their ends; else where each rank waits in its lowered list, -1 at its end.
  std::vector<std::int64_t> stuck_at;
  std::vector<double> clock_s, busy_s, exposed_comm_s;
  // When each compute action began, in the order of the lists.
  std::vector<double> start_s;
  // The messages, channel after channel: the send, its rank, when it entered the link and when it arrived.
  std::vector<Action> sends;
  std::vector<std::int32_t> senders;
  std::vector<double> message_start_s, message_end_s;
};

// Called from time to time with the share that is done.
using Progress = std::function<void(double)>;

// The lists have no fault and no misorder.
PC_API Walk walk(const Lists& lists, const Timing& timing, const Progress& progress);

}  // namespace pipecomm::schedule
