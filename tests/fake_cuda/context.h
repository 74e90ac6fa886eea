// Primary contexts, and which one a thread has.
//
// "If no CUcontext is current to the calling thread when a CUDA Runtime API call which requires an active context is
// made, then the primary context for a device will be selected, made current to the calling thread, and initialized";
// "cudaSetDevice() initializes the primary context for the specified device and makes it current" (Runtime API,
// Interactions with the CUDA Driver API). A thread's device is 0 until it sets one.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace fake_cuda {

class Stream;

// One device's primary context. Calls hold `lock`; those that drain the device hold it until all its streams are idle.
class Context {
 public:
  explicit Context(int device);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const int device;
  std::mutex lock;
  // The first error of the device; every later call gives it. "The context is in an error state":
  // cudaErrorIllegalAddress and the like "leave the process in an inconsistent state and any further CUDA work will
  // return the same error".
  std::atomic<int> error{0};

  std::shared_ptr<Stream> make_stream();
  std::shared_ptr<Stream> default_stream();
  void forget(const Stream* stream);
  // Waits for all that is enqueued on any stream of the device.
  void drain();
  // True the first time: the kernel is loaded now.
  bool load(const void* kernel);

 private:
  std::mutex streams_mutex_;
  std::set<std::shared_ptr<Stream>> streams_;
  std::shared_ptr<Stream> default_stream_;
  std::set<const void*> loaded_;
};

// Made at first use.
Context& primary_context(int device);
bool has_primary_context(int device);

// What a thread has.
struct ThreadState {
  int device = 0;
  std::vector<Context*> contexts;  // the current one last
  int last_error = 0;
  int capture_mode = 0;  // cudaStreamCaptureModeGlobal
  bool is_in_host_function = false;

  Context* current() const { return contexts.empty() ? nullptr : contexts.back(); }
  // As a runtime call that needs one does it.
  Context& current_or_made();
};
ThreadState& thread_state();

}  // namespace fake_cuda
