// What can be seen in the lists without running them: actions in excess, too early, or in another order than sent.
#pragma once

#include <cstdint>
#include <optional>

#include "base/api.h"
#include "schedule/lists.h"

namespace pipecomm::schedule {

struct Fault {
  enum Rule : std::int32_t { not_compute, wrong_stage, wrong_microbatch, second_rank, twice, rival, too_early };
  Rule rule;
  // Index of the action in the array of all.
  std::int64_t index;
  // second_rank: the first one; rival: the kind that ran before.
  std::int32_t other;
};

struct Misorder {
  // The action that uses another message than the next; the one that made the next; how many were used before.
  std::int64_t index;
  std::int64_t sent_index;
  std::int64_t num_used;
};

// The first action, rank after rank, that breaks a rule; needs no ways.
PC_API std::optional<Fault> find_fault(const Lists& lists, std::int32_t num_stages, std::int32_t num_microbatches);

// The first use of a message out of order. The lists have no fault and lack nothing.
PC_API std::optional<Misorder> find_misorder(const Lists& lists);

}  // namespace pipecomm::schedule
