// Replays a trace of allocations and frees against a policy, and notes what is live and what is reserved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/api.h"

namespace pipecomm {

// One allocation (of at least 0 bytes) or free (nbytes -1) of slot `slot`.
struct ReplayEvent {
  std::uint32_t slot;
  std::int64_t nbytes;
  std::int64_t stream;
};

struct ReplayTrace {
  std::vector<ReplayEvent> events;
  std::size_t num_slots = 0;
  std::size_t peak_live_nbytes = 0;
};

struct ReplayResult {
  std::size_t peak_reserved_nbytes = 0;
  std::uint64_t num_upstream_calls = 0;
  // The event that the capacity did not allow; -1: all were served.
  std::int64_t failed_at = -1;
  // At most as many as asked for, over equal parts of the trace: the most in each.
  std::vector<std::size_t> live_nbytes, reserved_nbytes;
};

// Numbers the blocks: `ids` may be used again after a free. Throws a config error, with the event's number, for an id
// that is allocated twice or freed without being live, a size below -1, or arrays of unequal length.
PC_API ReplayTrace prepare_replay(std::span<const std::int64_t> ids, std::span<const std::int64_t> nbytes,
                                  std::span<const std::int64_t> streams);
// By the policy of that name (policy.h) in `capacity_nbytes` (0: enough).
PC_API ReplayResult replay(const ReplayTrace& trace, const std::string& policy, std::size_t capacity_nbytes,
                           std::size_t num_samples);

}  // namespace pipecomm
