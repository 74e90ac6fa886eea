// A point in the order of a CUDA stream as the state of an Event.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "device/stream.h"

namespace pipecomm {

// The point before which a stream of ours has set a counter to `value`; none for a stream of others.
struct CounterPoint {
  std::shared_ptr<const Counter> counter;
  std::uint64_t value = 0;
};

// The point that `stream`, one of the current device, has reached.
Event record_cuda_event(cudaStream_t stream, int device_index, CounterPoint point = {});
// The same without a CUDA event: a stream that is made to wait for it waits for the counter, and CUDA does not know
// of that order ("CUDA tasks that are ... ordered by this API should also have that order expressed with CUDA-visible
// dependencies such as events", cuStreamWaitValue64). For what hosts alone wait for.
Event counted_cuda_event(int device_index, CounterPoint point);
// False for an event of the host.
bool is_cuda_event(const Event& event);
// The point is one of the stream that sets this counter.
bool is_point_of(const Event& event, const std::shared_ptr<Counter>& counter);

}  // namespace pipecomm
