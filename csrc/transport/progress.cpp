// The comm thread, the waiters, and how they sleep.
#include "transport/progress.h"

#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <utility>

namespace pipecomm {
namespace {

// A dead peer rings no bell, so sleepers look at their sockets this often.
constexpr std::int64_t kMaxSleepNs = 100'000'000;
// Under load, sockets are looked at this often.
constexpr std::int64_t kSocketPeriodNs = 1'000'000;
// A waiter polls this long before it sleeps: about the cost of a sleep and a wake.
constexpr std::int64_t kSpinNs = 15'000;

std::atomic<Progress*> g_instance{nullptr};
std::atomic<bool> g_is_forked_child{false};
std::mutex g_make_mutex;
// For the fork handler, which may not lock: written under Progress::mutex_, read in the child where no thread runs.
std::vector<std::shared_ptr<Pollable>>* g_pollables = nullptr;

void in_forked_child() {
  if (g_instance.load() == nullptr) return;
  g_is_forked_child.store(true);
  for (const auto& pollable : *g_pollables) pollable->forget_after_fork();
}

}  // namespace

std::int64_t now_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * std::int64_t{1'000'000'000} + time.tv_nsec;
}

Progress& Progress::instance() {
  if (g_is_forked_child.load()) {
    throw Error(ErrorKind::transport,
                "pipecomm was in use when this process was forked, and its connections stay with the parent; "
                "start processes with the 'spawn' or 'forkserver' method, or fork before the first process group");
  }
  if (Progress* made = g_instance.load()) return *made;
  const std::lock_guard lock(g_make_mutex);
  if (g_instance.load() == nullptr) {
    ::pthread_atfork(nullptr, nullptr, in_forked_child);
    g_instance.store(new Progress());
  }
  return *g_instance.load();
}

Progress::Progress() {
  g_pollables = &pollables_;
  std::thread([this] { run(); }).detach();
}

void Progress::add(std::shared_ptr<Pollable> pollable) {
  exclusively([&] { pollables_.push_back(std::move(pollable)); });
}

void Progress::remove(const Pollable* pollable) {
  exclusively([&] { std::erase_if(pollables_, [&](const auto& item) { return item.get() == pollable; }); });
}

void Progress::exclusively(const std::function<void()>& action) {
  num_waiters_.fetch_add(1);  // the comm thread makes way
  std::vector<std::shared_ptr<void>> dropped;
  try {
    const std::lock_guard lock(mutex_);
    action();
    dropped.swap(to_drop_);
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

bool Progress::poll_all() {
  bool moved = false;
  std::int64_t due = INT64_MAX;
  for (const auto& pollable : pollables_) {
    moved |= poll_one(*pollable);
    due = std::min(due, pollable->next_due_ns());
  }
  due_ns_.store(due);
  return moved;
}

// What a link cannot handle by itself (no memory, say) must not end the process of the comm thread.
bool Progress::poll_one(Pollable& pollable) {
  try {
    return pollable.poll();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pipecomm: transfers are held up: %s\n", error.what());
    return false;
  }
}

void Progress::poll_all_sockets() {
  for (const auto& pollable : pollables_) pollable->poll_sockets();
  sockets_polled_ns_.store(now_ns());
}

bool Progress::poll_if_free(bool with_sockets) {
  std::vector<std::shared_ptr<void>> dropped;  // outlives the lock
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  if (with_sockets || now_ns() - sockets_polled_ns_.load() > kSocketPeriodNs) poll_all_sockets();
  const bool moved = poll_all();
  dropped.swap(to_drop_);
  return moved;
}

std::int64_t Progress::sleep_limit_ns() const { return std::min(kMaxSleepNs, due_ns_.load() - now_ns()); }

void Progress::leave() {
  num_waiters_.fetch_sub(1);
  futex_wake_private(num_waiters_);
  kick();
}

bool Progress::wait_until(const std::function<bool()>& done, std::int64_t deadline_ns,
                          const InterruptCheck& interrupt) {
  if (done()) return true;
  num_waiters_.fetch_add(1);
  struct Leave {
    Progress& progress;
    ~Leave() { progress.leave(); }
  } leave_at_end{*this};
  std::int64_t spin_until = now_ns() + kSpinNs;
  std::int64_t interrupt_at = now_ns();
  while (true) {
    const bool moved = poll_if_free(false);
    if (done()) return true;
    const std::int64_t now = now_ns();
    if (now >= deadline_ns) return false;
    if (interrupt && now >= interrupt_at) {
      interrupt();
      interrupt_at = now + kMaxSleepNs;
    }
    if (moved) spin_until = now + kSpinNs;
    if (moved || now < spin_until) continue;
    const std::uint32_t seen = doorbell_.listen();
    if (poll_if_free(true) || done()) {
      doorbell_.stop_listening();
      continue;
    }
    doorbell_.sleep(seen, std::chrono::nanoseconds(std::min(sleep_limit_ns(), deadline_ns - now)));
  }
}

void Progress::run() {
  ::pthread_setname_np(::pthread_self(), "pipecomm");
  ::prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // emulated arrivals are due to the microsecond
  bool has_polled = false;
  while (true) {
    const std::uint32_t waiters = num_waiters_.load();
    if (waiters > 0) {
      // A waiter that found the lock taken may have gone to sleep: what is left is its to poll.
      if (std::exchange(has_polled, false)) kick();
      futex_wait_private(num_waiters_, waiters, std::chrono::nanoseconds(kMaxSleepNs));
      continue;
    }
    has_polled = true;
    if (poll_if_free(false)) continue;
    const std::uint32_t seen = doorbell_.listen();
    if (poll_if_free(true)) {
      doorbell_.stop_listening();
      continue;
    }
    doorbell_.sleep(seen, std::chrono::nanoseconds(sleep_limit_ns()));
  }
}

}  // namespace pipecomm
