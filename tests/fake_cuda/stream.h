// Streams as threads with a queue, and events.
//
// A queue has 1,024 entries: whoever enqueues one more waits for room, and holds the context's lock meanwhile. (The
// length is not documented; it was measured on several devices. That a launch may block is: "kernel launches are
// asynchronous ... up to an implementation-defined number", CUDA C++ Programming Guide, Asynchronous Concurrent
// Execution.)
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "context.h"

namespace fake_cuda {

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  explicit Stream(Context& of) : context(of) {}

  Context& context;
  // Set while it is captured: what is recorded, waited for or enqueued becomes part of a graph.
  std::atomic<bool> is_captured{false};
  std::atomic<bool> is_capture_invalid{false};
  int capture_mode = 0;

  void start();
  // Waits for room.
  void push(std::function<void()> operation);
  // Returns when all that was pushed is done, or the device is broken.
  void drain();
  std::size_t num_queued();
  // It ends when its queue is empty.
  void close();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool is_busy_ = false;
  bool is_closed_ = false;
};

// What one record of an event stands for.
struct Mark {
  std::atomic<bool> is_reached{false};
  bool is_captured = false;
  void reach() {
    is_reached.store(true);
    is_reached.notify_all();
  }
};

struct EventObject {
  Context& context;
  std::shared_ptr<Mark> mark;  // none: never recorded, and so reached
};

// Of a thread that must not stand still where the device breaks down meanwhile: waits until then, or for `done`.
void wait_for(const Context& context, const std::function<bool()>& done);
// Sleeps for a random time of at most machine().max_delay_us, now and then.
void delay();

}  // namespace fake_cuda
