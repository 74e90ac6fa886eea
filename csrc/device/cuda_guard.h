// Makes a device current by its primary context, which is retained once and never created by accident.
#pragma once

#include "device/cuda_call.h"
#include "device/scope.h"

namespace pipecomm {

// What a scope calls: only what enqueues work, which captures of other threads do not mind, or anything.
enum class Calls { any, enqueue };

// Makes the device current for a scope, and leaves the caller's device alone. A thread has device 0 until it sets one,
// and a runtime call without a context would make device 0's, hundreds of MiB of it; so a context is pushed where the
// thread has another one, and popped. Calls in the scope are allowed while other threads capture graphs: none of ours
// belongs to a capture.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_index, Calls calls = Calls::any);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_;
  bool is_entered_ = false;
  bool is_relaxed_here_ = false;
};

// For what a destructor does: it has nobody to tell of an error. `action` gives the status of its call, which must not
// be found by a later one of somebody else.
template <typename Action>
void quietly_on(int device_index, const Action& action) noexcept {
  try {
    const DeviceGuard guard(device_index);
    if (action() != cudaSuccess) cudaGetLastError();
  } catch (const Error&) {
  }
}

}  // namespace pipecomm
