// Counts, refusals and captures.
#include "call.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control.h"
#include "forbid.h"
#include "stream.h"

namespace fake_cuda {
namespace {

struct Refusal {
  int code;
  int after;
  int times;
};

struct Capture {
  Stream* stream;
  int mode;
  std::thread::id thread;
};

std::mutex g_mutex;  // guards the rest
std::map<std::string, std::uint64_t> g_counts;
std::map<std::string, Refusal> g_refusals;
std::vector<Capture> g_captures;

// 0 where the call is not refused.
int count_call(const char* name) {
  const std::lock_guard guard(g_mutex);
  ++g_counts[name];
  const auto found = g_refusals.find(name);
  if (found == g_refusals.end()) return 0;
  Refusal& refusal = found->second;
  if (refusal.after-- > 0) return 0;
  const int code = refusal.code;
  if (--refusal.times <= 0) g_refusals.erase(found);
  return code;
}

// Python's functions, where this is a process of Python.
bool holds_interpreter() {
  using Ask = int (*)();
  static const auto is_initialized = reinterpret_cast<Ask>(::dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  static const auto is_held = reinterpret_cast<Ask>(::dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return is_initialized != nullptr && is_held != nullptr && is_initialized() != 0 && is_held() != 0;
}

}  // namespace

Call::Call(const char* name, Needs needs, bool is_runtime) : is_runtime_(is_runtime) {
  ThreadState& thread = thread_state();
  require(!thread.is_in_host_function, name, "a host function must not make CUDA calls");
  require(!holds_interpreter(), name, "a call that may wait must not be made with the interpreter's lock held");
  code_ = count_call(name);
  if (code_ != 0) static_cast<void>(end(code_));
  if (needs == Needs::nothing || code_ != 0) return;
  delay();
  context_ = is_runtime ? &thread.current_or_made() : thread.current();
  if (context_ == nullptr) {
    code_ = CUDA_ERROR_INVALID_CONTEXT;
    return;
  }
  if (needs == Needs::thread) return;
  lock_ = std::unique_lock(context_->lock);
  if ((needs == Needs::unsafe || needs == Needs::drained) && is_unsafe_now()) {
    code_ = end(cudaErrorStreamCaptureUnsupported);
    return;
  }
  if (needs == Needs::drained) context_->drain();
  code_ = end(context_->error.load());
}

int Call::end(int code) {
  if (is_runtime_ && code != cudaSuccess && code != cudaErrorNotReady) thread_state().last_error = code;
  return code;
}

bool Call::is_unsafe_now() const {
  const int own_mode = thread_state().capture_mode;
  if (own_mode == cudaStreamCaptureModeRelaxed) return false;
  const std::lock_guard guard(g_mutex);
  for (const Capture& capture : g_captures) {
    const bool is_own = capture.thread == std::this_thread::get_id();
    const bool is_global = capture.mode == cudaStreamCaptureModeGlobal && own_mode == cudaStreamCaptureModeGlobal;
    if (!is_global && (!is_own || capture.mode == cudaStreamCaptureModeRelaxed)) continue;
    capture.stream->is_capture_invalid.store(true);
    return true;
  }
  return false;
}

void add_capture(Stream& stream, int mode) {
  const std::lock_guard guard(g_mutex);
  stream.is_captured.store(true);
  stream.is_capture_invalid.store(false);
  g_captures.push_back({&stream, mode, std::this_thread::get_id()});
}

bool remove_capture(Stream& stream) {
  const std::lock_guard guard(g_mutex);
  std::erase_if(g_captures, [&](const Capture& capture) { return capture.stream == &stream; });
  stream.is_captured.store(false);
  return !stream.is_capture_invalid.load();
}

void refuse(const std::string& call, int code, int times, int after) {
  const std::lock_guard guard(g_mutex);
  g_refusals[call] = {code, after, times};
}

std::uint64_t num_calls(const std::string& call) {
  const std::lock_guard guard(g_mutex);
  if (!call.empty()) return g_counts[call];
  std::uint64_t sum = 0;
  for (const auto& [name, count] : g_counts) sum += count;
  return sum;
}

std::string calls_text() {
  const std::lock_guard guard(g_mutex);
  std::string text;
  for (const auto& [name, count] : g_counts) text += (text.empty() ? "" : ", ") + name + " " + std::to_string(count);
  return text;
}

void forget_calls() {
  const std::lock_guard guard(g_mutex);
  g_counts.clear();
}

}  // namespace fake_cuda
