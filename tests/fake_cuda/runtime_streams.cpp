// The runtime's streams, events, copies and host functions.
#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "call.h"
#include "control.h"
#include "forbid.h"
#include "handles.h"
#include "memory.h"
#include "stream.h"

using namespace fake_cuda;

namespace {

cudaError_t result(int code) { return static_cast<cudaError_t>(code); }

// Where both are reached, the bytes are there afterwards; else the device is broken.
void copy_now(Context& context, void* dst, const void* src, std::size_t nbytes) {
  std::byte* to = reach(context.device, dst, nbytes, Reach::copy);
  const std::byte* from = reach(context.device, src, nbytes, Reach::copy);
  if (to == nullptr || from == nullptr) {
    context.error.store(cudaErrorIllegalAddress);
  } else {
    std::memcpy(to, from, nbytes);
  }
}

bool overlap(const void* a, const void* b, std::size_t nbytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(a), second = reinterpret_cast<std::uintptr_t>(b);
  return nbytes > 0 && first < second + nbytes && second < first + nbytes;
}

// "the event's last recorded state"; of an event of a graph, none.
int state_of(const EventObject& event) {
  if (const int error = event.context.error.load()) return error;
  if (!event.mark || event.mark->is_reached.load()) return cudaSuccess;
  return event.mark->is_captured ? cudaErrorCapturedEvent : cudaErrorNotReady;
}

}  // namespace

extern "C" {

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  Call call("cudaDeviceGetStreamPriorityRange", Needs::context, true);
  *lowest = 0, *highest = -5;
  return result(call.code());
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int) {
  Call call("cudaStreamCreateWithPriority", Needs::context, true);
  if (call.code() != 0) return result(call.code());
  require(flags == cudaStreamNonBlocking, "cudaStreamCreateWithPriority",
          "the stream does not wait for the default one");
  *stream = static_cast<cudaStream_t>(streams().add(call.context().make_stream()));
  return cudaSuccess;
}

// "Returns immediately and the resources ... will be released automatically once the device has completed all work".
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Call call("cudaStreamDestroy", Needs::context, true);
  const auto stream = streams().remove(handle, "cudaStreamDestroy");
  stream->context.forget(stream.get());
  stream->close();
  return result(call.code());
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Call call("cudaStreamSynchronize", Needs::unsafe, true);
  if (call.code() != 0) return result(call.code());
  const auto stream = stream_of(handle, call.context(), "cudaStreamSynchronize");
  require(!stream->is_captured.load(), "cudaStreamSynchronize", "the stream is not captured");
  call.unlock();
  stream->drain();
  return result(call.end(stream->context.error.load()));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Call call("cudaStreamIsCapturing", Needs::context, true);
  if (call.code() != 0) return result(call.code());
  const bool is_captured = stream_of(handle, call.context(), "cudaStreamIsCapturing")->is_captured.load();
  *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// "In the event of a device error, the function is not called."
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  Call call("cudaLaunchHostFunc", Needs::context, true);
  if (call.code() != 0) return result(call.code());
  stream_of(handle, call.context(), "cudaLaunchHostFunc")->push([function, argument] {
    thread_state().is_in_host_function = true;
    function(argument);
    thread_state().is_in_host_function = false;
  });
  return cudaSuccess;
}

// From and to pageable memory the call waits for the stream (API synchronization behavior, Memcpy).
cudaError_t cudaMemcpyAsync(void* dst, const void* src, std::size_t nbytes, cudaMemcpyKind kind, cudaStream_t handle) {
  Call call("cudaMemcpyAsync", Needs::context, true);
  if (call.code() != 0) return result(call.code());
  require(kind == cudaMemcpyDefault, "cudaMemcpyAsync", "the direction follows from the addresses");
  require(!overlap(dst, src, nbytes), "cudaMemcpyAsync", "the two ranges do not overlap");
  const auto stream = stream_of(handle, call.context(), "cudaMemcpyAsync");
  stream->push([=, &context = stream->context] { copy_now(context, dst, src, nbytes); });
  if (is_pageable(dst) || is_pageable(src)) stream->drain();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  Call call("cudaEventCreateWithFlags", Needs::context, true);
  if (call.code() != 0) return result(call.code());
  require(flags == cudaEventDisableTiming, "cudaEventCreateWithFlags", "the event takes no time");
  *event = static_cast<cudaEvent_t>(events().add(std::make_shared<EventObject>(call.context())));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Call call("cudaEventDestroy", Needs::context, true);
  static_cast<void>(events().remove(event, "cudaEventDestroy"));
  return result(call.code());
}

// "event and stream must be on the same CUDA context."
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  Call call("cudaEventRecord", Needs::context, true);
  if (call.code() != 0) return result(call.code());
  const auto event = events().find(handle, "cudaEventRecord");
  const auto stream = stream_of(stream_handle, call.context(), "cudaEventRecord");
  if (&event->context != &stream->context) return result(call.end(cudaErrorInvalidResourceHandle));
  const auto mark = std::make_shared<Mark>();
  event->mark = mark;
  mark->is_captured = stream->is_captured.load();
  if (!mark->is_captured) stream->push([mark] { mark->reach(); });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Call call("cudaEventQuery", Needs::unsafe, true);
  if (call.code() != 0) return result(call.code());
  return result(call.end(state_of(*events().find(event, "cudaEventQuery"))));
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Call call("cudaEventSynchronize", Needs::unsafe, true);
  if (call.code() != 0) return result(call.code());
  const auto event = events().find(handle, "cudaEventSynchronize");
  const auto mark = event->mark;
  call.unlock();
  if (mark) wait_for(event->context, [&] { return mark->is_reached.load(); });
  return result(call.end(event->context.error.load()));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned int flags) {
  Call call("cudaStreamWaitEvent", Needs::context, true);
  if (call.code() != 0) return result(call.code());
  require(flags == 0, "cudaStreamWaitEvent", "there are no flags");
  const auto event = events().find(handle, "cudaStreamWaitEvent");
  const auto stream = stream_of(stream_handle, call.context(), "cudaStreamWaitEvent");
  const auto mark = event->mark;
  if (!mark) return cudaSuccess;
  if (mark->is_captured != stream->is_captured.load()) return result(call.end(cudaErrorStreamCaptureIsolation));
  stream->push([mark, &context = stream->context] { wait_for(context, [&] { return mark->is_reached.load(); }); });
  return cudaSuccess;
}

}  // extern "C"

namespace fake_cuda {

void begin_capture(void* stream, int mode) { add_capture(*streams().find(stream, "begin_capture"), mode); }
bool end_capture(void* stream) { return remove_capture(*streams().find(stream, "end_capture")); }
std::size_t num_queued(void* stream) { return streams().find(stream, "num_queued")->num_queued(); }

}  // namespace fake_cuda
