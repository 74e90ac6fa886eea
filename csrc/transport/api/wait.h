// How long a wait lasts, and what ends it before.
#pragma once

#include <chrono>
#include <functional>

namespace pipecomm {

using Nanoseconds = std::chrono::nanoseconds;
// Called at least every 100 ms from a waiting thread; may throw to end the wait (the transfer is then cancelled).
using InterruptCheck = std::function<void()>;

}  // namespace pipecomm
