// What happens at the begin of every call: it is counted, perhaps refused, gets its context, and waits for its lock.
//
// - A call that the driver must drain the device for (first launch of a kernel that is loaded lazily, cudaMalloc,
//   cudaFree, page-locked memory) holds the context's lock until every stream is idle, and calls of other threads wait.
//   "Loading kernels might require context synchronization"; "if all preceding streams are not idle ... a page-locked
//   host memory allocation, a device memory allocation" cannot run at the same time (CUDA C++ Programming Guide, Lazy
//   Loading; Implicit Synchronization).
// - "Any call may return error codes from previous, asynchronous launches" (every page of the Runtime API).
// - Host functions "must not make any CUDA API calls" (cudaLaunchHostFunc).
// - No call is made with Python's lock held: whoever drains the device may wait for what another thread of Python has
//   still to do. (A rule of ours, not of CUDA.)
// - While a capture is under way that is not relaxed, potentially unsafe calls are refused, and end the capture: to all
//   threads in mode global, to the one that began it in mode thread-local, to none whose own mode is relaxed
//   (cudaThreadExchangeStreamCaptureMode).
#pragma once

#include <mutex>
#include <optional>

#include "context.h"

namespace fake_cuda {

enum class Needs {
  nothing,  // neither a context nor its lock
  thread,   // the thread's context, without its lock
  context,
  unsafe,   // likewise, and not while a stream is captured
  drained,  // likewise, with all streams idle
};

class Call {
 public:
  // Of the runtime where `is_runtime`: makes the context where there is none.
  Call(const char* name, Needs needs, bool is_runtime);
  // Not cudaSuccess: give this instead of doing anything.
  int code() const { return code_; }
  // Only where the call needs one.
  Context& context() { return *context_; }
  // The runtime remembers it for cudaGetLastError.
  int end(int code);
  // Waits for all streams, with the lock held.
  void drain() { context_->drain(); }
  // For a call that waits for a stream, and lets others go on meanwhile.
  void unlock() { lock_.unlock(); }

 private:
  bool is_unsafe_now() const;

  const bool is_runtime_;
  Context* context_ = nullptr;
  std::unique_lock<std::mutex> lock_;
  int code_ = 0;
};

// Captures under way.
void add_capture(Stream& stream, int mode);
bool remove_capture(Stream& stream);

}  // namespace fake_cuda
