// Contexts are never destroyed: a primary context lives as long as its process here.
#include "context.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "control.h"
#include "stream.h"

namespace fake_cuda {
namespace {

std::mutex g_mutex;

std::map<int, Context*>& contexts() {
  static auto* all = new std::map<int, Context*>;
  return *all;
}

// FAKE_CUDA_LOG names a file that all processes append "pid device" to.
void log_context(int device) {
  const char* path = std::getenv("FAKE_CUDA_LOG");
  std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "a");
  if (file == nullptr) return;
  std::fprintf(file, "%d %d\n", static_cast<int>(::getpid()), device);
  std::fclose(file);
}

}  // namespace

Context::Context(int of) : device(of) {}

std::shared_ptr<Stream> Context::make_stream() {
  auto stream = std::make_shared<Stream>(*this);
  stream->start();
  const std::lock_guard guard(streams_mutex_);
  streams_.insert(stream);
  return stream;
}

// With the lock held.
std::shared_ptr<Stream> Context::default_stream() {
  if (!default_stream_) default_stream_ = make_stream();
  return default_stream_;
}

void Context::forget(const Stream* stream) {
  const std::lock_guard guard(streams_mutex_);
  std::erase_if(streams_, [&](const auto& item) { return item.get() == stream; });
}

void Context::drain() {
  std::set<std::shared_ptr<Stream>> streams;
  {
    const std::lock_guard guard(streams_mutex_);
    streams = streams_;
  }
  for (const auto& stream : streams) stream->drain();
}

bool Context::load(const void* kernel) { return loaded_.insert(kernel).second; }

Context& primary_context(int device) {
  const std::lock_guard guard(g_mutex);
  Context*& context = contexts()[device];
  if (context == nullptr) {
    context = new Context(device);
    log_context(device);
  }
  return *context;
}

bool has_primary_context(int device) {
  const std::lock_guard guard(g_mutex);
  return contexts().contains(device);
}

Context& ThreadState::current_or_made() {
  if (contexts.empty()) contexts.push_back(&primary_context(device));
  return *contexts.back();
}

ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

int num_contexts(int device) { return has_primary_context(device) ? 1 : 0; }

void begin_anew() {
  contexts().clear();
  thread_state() = {};
}

void break_device(int device, int code) { primary_context(device).error.store(code); }

}  // namespace fake_cuda
