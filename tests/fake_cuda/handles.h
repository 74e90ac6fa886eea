// Streams and events by the handles that the sources hold. A handle that was destroyed must not be used any more.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>

#include "context.h"
#include "forbid.h"
#include "stream.h"

namespace fake_cuda {

template <typename Object>
class Handles {
 public:
  void* add(std::shared_ptr<Object> object) {
    const std::lock_guard guard(mutex_);
    void* handle = object.get();
    objects_[handle] = std::move(object);
    return handle;
  }
  std::shared_ptr<Object> find(void* handle, const char* call) {
    const std::lock_guard guard(mutex_);
    const auto found = objects_.find(handle);
    require(found != objects_.end(), call, "the handle is one that was made and not destroyed");
    return found->second;
  }
  std::shared_ptr<Object> remove(void* handle, const char* call) {
    std::shared_ptr<Object> object = find(handle, call);
    const std::lock_guard guard(mutex_);
    objects_.erase(handle);
    return object;
  }

 private:
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Object>> objects_;
};

inline Handles<Stream>& streams() {
  static auto* all = new Handles<Stream>;
  return *all;
}
inline Handles<EventObject>& events() {
  static auto* all = new Handles<EventObject>;
  return *all;
}

// 0 is the default stream of the context.
inline std::shared_ptr<Stream> stream_of(void* handle, Context& context, const char* call) {
  return handle == nullptr ? context.default_stream() : streams().find(handle, call);
}

}  // namespace fake_cuda
