// The contexts that this process has retained, and what each thread has pushed.
#include <map>
#include <mutex>

#include "device/cuda_guard.h"

namespace pipecomm {
namespace {

constexpr int kNone = -1;

struct Pushed {
  int device_index = kNone;
  int num_guards = 0;                                                 // 0: it is only kept
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_RELAXED;  // the thread's own, while one is pushed
};

thread_local Pushed t_pushed;

CUcontext primary_context(int device_index) {
  static std::mutex mutex;
  static auto* retained = new std::map<int, CUcontext>;  // as long as the process: releasing would end others' work
  const std::lock_guard lock(mutex);
  CUcontext& context = (*retained)[device_index];
  if (context == nullptr) PC_DRIVER(cuDevicePrimaryCtxRetain, device_index)(&context, CUdevice{device_index});
  return context;
}

void exchange_capture_mode() {
  PC_DRIVER(cuThreadExchangeStreamCaptureMode, t_pushed.device_index)(&t_pushed.capture_mode);
}

void pop() {
  CUcontext popped = nullptr;
  PC_DRIVER(cuCtxPopCurrent, t_pushed.device_index)(&popped);
}

// The outermost one.
void leave() noexcept {
  if (t_pushed.device_index == kNone) return;
  try {
    exchange_capture_mode();
    pop();
  } catch (const Error&) {
  }
  t_pushed = {};
}

}  // namespace

DeviceGuard::DeviceGuard(int device_index) {
  if (t_pushed.num_guards == 0 && t_pushed.device_index != kNone && t_pushed.device_index != device_index) leave();
  before_ = t_pushed.device_index;
  if (before_ != device_index) {
    PC_DRIVER(cuCtxPushCurrent, device_index)(primary_context(device_index));
    is_pushed_ = true;
    t_pushed.device_index = device_index;
    if (before_ == kNone) exchange_capture_mode();
  }
  ++t_pushed.num_guards;
}

DeviceGuard::~DeviceGuard() {
  --t_pushed.num_guards;
  if (!is_pushed_) return;
  if (before_ == kNone) {
    if (!DeviceScope::keep(&leave)) leave();
    return;
  }
  try {
    pop();
  } catch (const Error&) {
  }
  t_pushed.device_index = before_;
}

}  // namespace pipecomm
