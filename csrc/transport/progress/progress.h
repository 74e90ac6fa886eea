// What moves all transfers of this process: one comm thread, or whoever waits, polls every communicator in turn.
//
// One lock guards all transfer state. A waiting thread polls by itself (no context switch) and the comm thread stands
// by. When the last waiter leaves something undone, it calls the comm thread; when nothing, the comm thread finds out
// by itself a moment later: blocking calls that follow each other never wake it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "sockets/doorbell.h"
#include "transport/api/wait.h"
#include "transport/progress/report_socket.h"

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
  // What is pending, a line each, for a hang report. Called under the progress lock.
  virtual std::string describe() const = 0;
  // Closes inherited descriptors in a forked child; async-signal-safe.
  virtual void forget_after_fork() noexcept = 0;
};

// Sent, and not taken by the peer.
struct InFlight {
  std::size_t num_messages = 0;
  std::size_t nbytes = 0;
};

// Memory that a device still reads or writes.
class Draining {
 public:
  virtual ~Draining() = default;
  // Gives it back, or asks for another call (release_later). Called under the progress lock.
  virtual void release() = 0;
};

class Progress {
 public:
  // Made at first use and never destroyed: the comm thread may run until the process ends. Throws in a forked child.
  static Progress& instance();

  Doorbell& doorbell() { return doorbell_; }
  void add(std::shared_ptr<Pollable> pollable);
  void remove(const Pollable* pollable);
  // Tells whoever sleeps that there is new work. A comm thread that stands by hears of it a moment later.
  void kick() { doorbell_.ring(); }
  // The same; if nobody waits, the comm thread starts at once.
  void kick_now();
  // Transfers that are posted and not done: what waiters must not leave lying.
  void count_open(std::int32_t change) { num_open_.fetch_add(change); }
  // Polls until done() or the deadline; false at the deadline. `interrupt` may throw.
  bool wait_until(const std::function<bool()>& done, std::int64_t deadline_ns, const InterruptCheck& interrupt);
  // Runs `action` while nobody polls.
  void exclusively(const std::function<void()>& action);
  // The same, unless somebody polls right now: then false.
  bool exclusively_if_free(const std::function<void()>& action);
  // Calls its release() again, a moment later. Under the lock.
  void release_later(std::shared_ptr<Draining> draining) { draining_.push_back(std::move(draining)); }
  // Of this process, as far as senders count it. Under the lock.
  InFlight& in_flight() { return in_flight_; }
  // Drops an owner once the progress lock is free: its deleter may take other locks (Python's). Under the lock.
  void drop_later(std::shared_ptr<void> owner) { to_drop_.push_back(std::move(owner)); }

 private:
  Progress();
  static void in_forked_child();
  void run();
  bool poll_all();
  void release_drained();
  bool poll_one(Pollable& pollable);
  void poll_all_sockets();
  std::string hang_report() const;
  bool poll_if_free();
  bool poll_before_sleep();
  std::int64_t sleep_limit_ns() const;
  void leave(std::int64_t entered_ns);
  void call_comm_thread();
  bool stand_by();

  Doorbell doorbell_;
  std::mutex mutex_;                                  // guards pollables_ and all transfer state
  std::vector<std::shared_ptr<Pollable>> pollables_;  // guarded by mutex_
  std::vector<std::shared_ptr<void>> to_drop_;        // guarded by mutex_
  std::vector<std::shared_ptr<Draining>> draining_;   // guarded by mutex_
  InFlight in_flight_;                                // guarded by mutex_
  ReportSocket report_socket_;                        // guarded by mutex_
  std::int64_t report_served_ns_ = 0;                 // guarded by mutex_
  std::atomic<std::int64_t> due_ns_{INT64_MAX};
  std::atomic<std::int64_t> sockets_polled_ns_{0};
  std::atomic<std::int32_t> num_open_{0};
  std::atomic<std::uint32_t> num_waiters_{0};
  std::atomic<std::uint32_t> num_wanting_lock_{0};  // busy pollers make way
  std::atomic<std::uint32_t> num_waits_{0};         // ever; unchanged = nobody has waited since
  std::atomic<std::uint32_t> calls_{0};             // what the comm thread stands by on
  std::atomic<bool> stands_by_{false};

  // The comm thread's own.
  std::uint32_t num_waits_seen_ = 0;
  std::int64_t stand_by_ns_ = 0;
};

}  // namespace pipecomm
