// What a pool was asked for, in order.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace pipecomm {

// Of a block that is live, `id` is unique.
struct TraceEvent {
  std::uint64_t id;
  std::int64_t nbytes;  // -1: freed
};

class TraceRecorder {
 public:
  void add(const void* data, std::int64_t nbytes) {
    const std::scoped_lock lock(mutex_);
    events_.push_back({reinterpret_cast<std::uintptr_t>(data), nbytes});
  }
  std::vector<TraceEvent> take() {
    const std::scoped_lock lock(mutex_);
    return std::move(events_);
  }

 private:
  std::mutex mutex_;
  std::vector<TraceEvent> events_;  // guarded by mutex_
};

}  // namespace pipecomm
