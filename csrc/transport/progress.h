// What moves all transfers of this process: one comm thread, or whoever waits, polls every communicator in turn.
//
// One lock guards all transfer state. A waiting thread polls by itself (fewer context switches) and the comm thread
// then stays out of its way; when the last waiter leaves, the comm thread takes over.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "transport/communicator.h"
#include "transport/doorbell.h"

namespace pipecomm {

// CLOCK_MONOTONIC, as Python's time.monotonic_ns().
std::int64_t now_ns();

class Pollable {
 public:
  virtual ~Pollable() = default;
  // Moves what can be moved; true if anything moved. Called under the progress lock.
  virtual bool poll() = 0;
  // Reads control messages and ends of file. Called under the progress lock.
  virtual void poll_sockets() = 0;
  // Earliest time something becomes due by itself (an emulated arrival); INT64_MAX when nothing will.
  virtual std::int64_t next_due_ns() const = 0;
  // Closes inherited descriptors in a forked child; async-signal-safe.
  virtual void forget_after_fork() noexcept = 0;
};

class Progress {
 public:
  // Made at first use and never destroyed: the comm thread may run until the process ends. Throws in a forked child.
  static Progress& instance();

  Doorbell& doorbell() { return doorbell_; }
  void add(std::shared_ptr<Pollable> pollable);
  void remove(const Pollable* pollable);
  // Tells whoever polls that there is new work.
  void kick() { doorbell_.ring(); }
  // Polls until done() or the deadline; false at the deadline. `interrupt` may throw.
  bool wait_until(const std::function<bool()>& done, std::int64_t deadline_ns, const InterruptCheck& interrupt);
  // Runs `action` while nobody polls.
  void exclusively(const std::function<void()>& action);
  // Drops an owner once the progress lock is free: its deleter may take other locks (Python's). Under the lock.
  void drop_later(std::shared_ptr<void> owner) { to_drop_.push_back(std::move(owner)); }

 private:
  Progress();
  void run();
  bool poll_all();
  bool poll_one(Pollable& pollable);
  void poll_all_sockets();
  bool poll_if_free(bool with_sockets);
  std::int64_t sleep_limit_ns() const;
  void leave();

  Doorbell doorbell_;
  std::mutex mutex_;                                  // guards pollables_ and all transfer state
  std::vector<std::shared_ptr<Pollable>> pollables_;  // guarded by mutex_
  std::vector<std::shared_ptr<void>> to_drop_;        // guarded by mutex_
  std::atomic<std::int64_t> due_ns_{INT64_MAX};
  std::atomic<std::int64_t> sockets_polled_ns_{0};
  std::atomic<std::uint32_t> num_waiters_{0};
};

}  // namespace pipecomm
