// Ordered queues of work, events between them, and copies: host (a worker thread) and CUDA behind one header.
// The CUDA half (cuda_stream.cu) runs over a stand-in driver (tests/fake_cuda); not yet run on a GPU.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "base/api.h"
#include "base/error.h"

namespace pipecomm {

// A number that only grows, in memory that hosts and devices see. On CUDA: host memory registered with the device.
using Counter = std::atomic<std::uint64_t>;
static_assert(Counter::is_always_lock_free && sizeof(Counter) == 8);

// A point in a stream's order. Copies share the point. Default constructed: already reached. Thread-safe.
class PC_API Event {
 public:
  class State;

  Event() = default;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // True when all work before the point is done, or never will be because the device has failed; does not wait for
  // the device.
  bool is_ready() const;
  // Why the point will never be reached; none while that is not known.
  std::optional<Error> error() const;
  // Blocks the calling thread until the point is reached.
  void wait() const;
  // Later work of `native_stream` (a cudaStream_t) runs after the point; the caller does not block, except for a point
  // of a host stream.
  void block(void* native_stream) const;
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

// What a device provides for its events.
class PC_API Event::State {
 public:
  virtual ~State() = default;
  virtual bool is_ready() const = 0;
  virtual std::optional<Error> error() const { return std::nullopt; }
  virtual void wait() const = 0;
  virtual void block(void*) const { wait(); }
};

// Work runs one after the other, in the order of the calls. Thread-safe. The destructor waits for all of it.
class PC_API Stream {
 public:
  virtual ~Stream() = default;

  // Runs `work` on a host thread; it must not throw, and on CUDA must not call CUDA.
  virtual void enqueue(std::function<void()> work) = 0;
  // Copies `nbytes`; both ranges must stay valid until an event recorded afterwards is ready, and must not overlap.
  virtual void copy_async(void* dst, const void* src, std::size_t nbytes) = 0;
  // The point after all work posted so far.
  virtual Event record() = 0;
  // Later work of this stream runs after `event`, whichever stream recorded it. The caller does not block.
  virtual void wait(const Event& event) = 0;
  // Later work of this stream runs once `counter` is at least `value`, and sees what was written before it was set.
  virtual void wait_value(const Counter& counter, std::uint64_t value) = 0;
  // Sets `counter` once all earlier work is done and can be seen by everybody. Gives the point after it, for hosts
  // alone: no stream may wait for it.
  virtual Event write_value(Counter& counter, std::uint64_t value) = 0;
  // Writes of counters that are enqueued and not done; 0 where nothing bounds how much may be enqueued.
  virtual std::size_t num_pending() const { return 0; }
  // Calls `start` now, with the stream's device current, to start kernels on its cudaStream_t; false on a host stream.
  virtual bool launch(const std::function<void(void*)>& start) = 0;
  // Blocks the calling thread until all work posted so far is done.
  void synchronize() { record().wait(); }
};

PC_API std::shared_ptr<Stream> make_host_stream();
// The same, but each piece of work begins that long after the one before it is done, so that code that fails to wait is
// caught.
PC_API std::shared_ptr<Stream> make_lagging_stream(std::chrono::microseconds lag);
// A non-blocking stream of the highest priority on CUDA device `device_index`. Throws a not built error where nvcc was
// not there at build time, a CUDA error where the driver or the device is missing.
PC_API std::shared_ptr<Stream> make_cuda_stream(int device_index);

}  // namespace pipecomm
