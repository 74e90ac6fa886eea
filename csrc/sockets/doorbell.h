// How a sleeping process is woken: one futex word of its own that every peer maps and bumps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "memory/segment.h"

namespace pipecomm {

// Lives in a shared page. All threads of a process sleep on its one word.
struct DoorbellWords {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

inline constexpr std::size_t kDoorbellNbytes = 4096;

// Wakes the owner if it sleeps; a system call only then.
void ring_doorbell(DoorbellWords& words);

// This process's own doorbell. To sleep without missing a ring:
//   seen = listen(); look for work once more; sleep(seen, ...) or stop_listening().
class Doorbell {
 public:
  Doorbell();
  int fd() const { return segment_.fd(); }
  void ring() { ring_doorbell(words()); }
  std::uint32_t listen();
  void stop_listening();
  void sleep(std::uint32_t seen, std::chrono::nanoseconds at_most);

 private:
  DoorbellWords& words() const { return *reinterpret_cast<DoorbellWords*>(segment_.data()); }
  Segment segment_;
};

// Process-private wait on a word, used where no peer is concerned.
void futex_wait_private(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds at_most);
void futex_wake_private(std::atomic<std::uint32_t>& word);

}  // namespace pipecomm
