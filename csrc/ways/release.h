// Lets streams go that wait for a peer which has died: without a call of CUDA, which might have to wait for them, and
// without the lock of the transfers, whose holder might be in such a call.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/api.h"
#include "device/stream.h"

namespace pipecomm {

// What one stream waits for. Outlives the counter. Thread-safe.
class PC_API StreamRelease {
 public:
  // What a counter is set to that no stream waits for any more.
  static constexpr std::uint64_t kReleased = std::uint64_t{1} << 62;

  explicit StreamRelease(Counter& awaited) : awaited_(&awaited) {}

  // Lets the stream pass. Again and again, since what the peer's device still does may set the counter to less.
  void now();
  // How far the peer has set the counter; once the stream is let go, how far it had come by then.
  std::uint64_t passed() const;
  // The counter ends.
  void end();

 private:
  mutable std::mutex mutex_;
  Counter* awaited_;
  std::optional<std::uint64_t> passed_;  // at the first now(), before which no stream has passed by it
};

// A thread of the process that only polls life lines and lets streams go. It sleeps while nobody hangs up.
class PC_API ReleaseWatch {
 public:
  // Never destroyed.
  static ReleaseWatch& instance();

  // Lets the stream go once the other end of `lifeline_fd` is closed, and until remove(). Who closes the descriptor
  // first calls hang_up().
  void add(int lifeline_fd, std::shared_ptr<StreamRelease> release);
  void remove(const StreamRelease* release);
  void hang_up(const StreamRelease* release);

 private:
  struct Watched {
    int fd;
    bool has_hung_up;
    std::shared_ptr<StreamRelease> release;
  };

  ReleaseWatch();
  void run();
  // False: nobody has hung up.
  bool let_go();

  const int epoll_fd_;
  std::mutex mutex_;
  std::vector<Watched> watched_;
};

// One stream's place in the watch.
class PC_API WatchedRelease {
 public:
  WatchedRelease(int lifeline_fd, std::shared_ptr<StreamRelease> release);
  ~WatchedRelease() { ReleaseWatch::instance().remove(release_.get()); }
  WatchedRelease(const WatchedRelease&) = delete;
  WatchedRelease& operator=(const WatchedRelease&) = delete;

  void hang_up() { ReleaseWatch::instance().hang_up(release_.get()); }

 private:
  const std::shared_ptr<StreamRelease> release_;
};

}  // namespace pipecomm
