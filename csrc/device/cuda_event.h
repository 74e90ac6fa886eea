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

// A stream of ours, in which an event can be recorded for the last point as long as nothing else is enqueued.
class MarkedStream {
 public:
  virtual ~MarkedStream() = default;
  // The last point gets its event, unless it has been reached. Any thread.
  virtual void mark_last() = 0;
};

// The point that `stream`, one of the current device, has reached.
Event record_cuda_event(cudaStream_t stream, int device_index);
// The last point of a stream of ours. An event of CUDA is recorded for it when a stream is made to wait for it, or when
// the stream is about to go on: most points are only asked for by hosts, or reached before.
Event last_cuda_event(int device_index, CounterPoint point, std::weak_ptr<MarkedStream> stream);
// Records the event of last_cuda_event(), if its point is not reached and somebody still has it. The device is current.
void mark_cuda_event(const std::weak_ptr<Event::State>& state, cudaStream_t stream);
// Before a stream's lock is taken: block() then takes no other one's.
void prepare_cuda_event(const Event& event);
// The same without a CUDA event: a stream that is made to wait for it waits for the counter, and CUDA does not know
// of that order ("CUDA tasks that are ... ordered by this API should also have that order expressed with CUDA-visible
// dependencies such as events", cuStreamWaitValue64). For what hosts alone wait for.
Event counted_cuda_event(int device_index, CounterPoint point);
// False for an event of the host.
bool is_cuda_event(const Event& event);
// The point is one of the stream that sets this counter.
bool is_point_of(const Event& event, const std::shared_ptr<Counter>& counter);

}  // namespace pipecomm
