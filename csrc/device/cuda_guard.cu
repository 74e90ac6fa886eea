// The contexts that this process has retained, and what each thread has pushed.
#include <map>
#include <mutex>

#include "device/cuda_guard.h"

namespace pipecomm {
namespace {

constexpr int kNone = -1;

struct Pushed {
  int device_index = kNone;
  bool is_pushed = false;  // false: the thread has it anyway
  int num_guards = 0;      // 0: it is only kept
  bool is_relaxed = false;
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_RELAXED;  // the thread's own, while relaxed
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

bool is_current(CUcontext context, int device_index) {
  CUcontext current = nullptr;
  PC_DRIVER(cuCtxGetCurrent, device_index)(&current);
  return current == context;
}

void enter(int device_index, bool is_outermost) {
  const CUcontext context = primary_context(device_index);
  const bool has_it = is_outermost && is_current(context, device_index);
  if (!has_it) PC_DRIVER(cuCtxPushCurrent, device_index)(context);
  if (is_outermost) t_pushed.is_pushed = !has_it;
  t_pushed.device_index = device_index;
}

void restore_capture_mode() {
  exchange_capture_mode();
  t_pushed.is_relaxed = false;
  t_pushed.capture_mode = CU_STREAM_CAPTURE_MODE_RELAXED;
}

// The outermost one.
void leave() noexcept {
  if (t_pushed.device_index == kNone) return;
  try {
    if (t_pushed.is_relaxed) restore_capture_mode();
    if (t_pushed.is_pushed) pop();
  } catch (const Error&) {
  }
  t_pushed = {};
}

}  // namespace

DeviceGuard::DeviceGuard(int device_index, Calls calls) {
  if (t_pushed.num_guards == 0 && t_pushed.device_index != kNone && t_pushed.device_index != device_index) leave();
  before_ = t_pushed.device_index;
  if (before_ != device_index) {
    enter(device_index, before_ == kNone);
    is_entered_ = true;
  }
  if (calls == Calls::any && !t_pushed.is_relaxed) {
    exchange_capture_mode();
    t_pushed.is_relaxed = true;
    is_relaxed_here_ = true;
  }
  ++t_pushed.num_guards;
}

DeviceGuard::~DeviceGuard() {
  --t_pushed.num_guards;
  if (is_entered_ && before_ == kNone) {
    if (!DeviceScope::keep(&leave)) leave();
    return;
  }
  try {
    if (is_relaxed_here_ && !DeviceScope::keep(&leave)) restore_capture_mode();
    if (is_entered_) pop();
  } catch (const Error&) {
  }
  if (is_entered_) t_pushed.device_index = before_;
}

}  // namespace pipecomm
