// How much memory the system would still give this process: the machine, and the control groups it runs in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/api.h"

namespace pipecomm {

struct AvailableMemory {
  std::size_t nbytes = SIZE_MAX;  // where nothing is said
  std::string where;              // what sets it, and what to do, in the words of an error
};

// The least of what the machine has available and what each memory limit above this process (cgroup v1 or v2, nested)
// leaves. Reads a few small files each time: limits, and the groups of a process, change. `root` is put before their
// paths.
PC_API AvailableMemory available_memory(const std::string& root = "");

}  // namespace pipecomm
