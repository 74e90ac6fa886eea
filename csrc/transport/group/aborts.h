// The epochs that some rank has given up, and why.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace pipecomm {

// Thread-safe.
class AbortLog {
 public:
  // False where the epoch has been given up already: the first text counts.
  bool add(std::uint32_t epoch, const std::string& text) {
    const std::lock_guard lock(mutex_);
    return texts_.emplace(epoch, text).second;
  }

  std::optional<std::string> text(std::uint32_t epoch) const {
    const std::lock_guard lock(mutex_);
    const auto item = texts_.find(epoch);
    return item == texts_.end() ? std::nullopt : std::optional(item->second);
  }

  void forget_before(std::uint32_t epoch) {
    const std::lock_guard lock(mutex_);
    texts_.erase(texts_.begin(), texts_.lower_bound(epoch));
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::uint32_t, std::string> texts_;  // guarded by mutex_
};

}  // namespace pipecomm
