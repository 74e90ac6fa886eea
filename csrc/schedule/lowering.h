// Puts sends and receives between the compute actions; the rule is in pipecomm/schedule/lowering.py.
#pragma once

#include <cstdint>
#include <vector>

#include "base/api.h"
#include "schedule/lists.h"

namespace pipecomm::schedule {

struct Lowered {
  std::vector<Action> actions;
  std::vector<std::int64_t> offsets;
};

// The lists have no fault.
PC_API Lowered lower(const Lists& lists);

}  // namespace pipecomm::schedule
