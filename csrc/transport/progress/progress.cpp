// The comm thread, the waiters, and how they sleep.
#include "transport/progress/progress.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <utility>

#include "base/error.h"
#include "device/scope.h"

namespace pipecomm {
namespace {

// A dead peer rings no bell, so sleepers look at their sockets this often.
constexpr std::int64_t kMaxSleepNs = 100'000'000;
// Under load, sockets are looked at this often.
constexpr std::int64_t kSocketPeriodNs = 1'000'000;
// A waiter polls this long before it sleeps: a few times the cost of a sleep and a wake, and what an answer takes.
constexpr std::int64_t kSpinNs = 40'000;
// The comm thread stands by this long at first; twice as long each time that one wait lasts all the while.
constexpr std::int64_t kStandByNs = 300'000;
// Nobody rings when a device has done its work, so it is asked this often while there is some.
constexpr std::int64_t kDevicePeriodNs = 200'000;

std::atomic<Progress*> g_instance{nullptr};
std::atomic<bool> g_is_forked_child{false};
std::mutex g_make_mutex;
}  // namespace

void Progress::in_forked_child() {
  Progress* made = g_instance.load();
  if (made == nullptr) return;
  g_is_forked_child.store(true);
  // Without the lock, which a thread that is not there may hold: no thread runs here.
  for (const auto& pollable : made->pollables_) pollable->forget_after_fork();
  made->report_socket_.forget_after_fork();
}

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
  std::thread([this] { run(); }).detach();
}

void Progress::add(std::shared_ptr<Pollable> pollable) {
  exclusively([&] { pollables_.push_back(std::move(pollable)); });
}

void Progress::remove(const Pollable* pollable) {
  exclusively([&] { std::erase_if(pollables_, [&](const auto& item) { return item.get() == pollable; }); });
}

void Progress::exclusively(const std::function<void()>& action) {
  std::vector<std::shared_ptr<void>> dropped;
  const auto kick_at_end = [this] {
    num_wanting_lock_.fetch_sub(1);
    num_open_.load() > 0 ? kick_now() : kick();
  };
  num_wanting_lock_.fetch_add(1);
  try {
    const std::lock_guard lock(mutex_);
    action();
    dropped.swap(to_drop_);
  } catch (...) {
    kick_at_end();
    throw;
  }
  kick_at_end();
}

bool Progress::exclusively_if_free(const std::function<void()>& action) {
  std::vector<std::shared_ptr<void>> dropped;  // outlives the lock
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  action();
  dropped.swap(to_drop_);
  return true;
}

bool Progress::poll_all() {
  bool moved = false;
  std::int64_t due = INT64_MAX;
  for (const auto& pollable : pollables_) {
    moved |= poll_one(*pollable);
    due = std::min(due, pollable->next_due_ns());
  }
  release_drained();
  if (!draining_.empty()) due = std::min(due, now_ns() + kDevicePeriodNs);
  due_ns_.store(due);
  return moved;
}

void Progress::release_drained() {
  if (draining_.empty()) return;
  std::vector<std::shared_ptr<Draining>> drained;
  drained.swap(draining_);
  for (const auto& draining : drained) draining->release();  // those that are not done come back
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
  const std::int64_t now = now_ns();
  sockets_polled_ns_.store(now);
  if (now - report_served_ns_ < kMaxSleepNs) return;
  report_served_ns_ = now;
  report_socket_.serve([this] { return hang_report(); });
}

std::string Progress::hang_report() const {
  std::string text = "process " + std::to_string(::getpid()) + "\n";
  for (const auto& pollable : pollables_) text += pollable->describe();
  return text;
}

bool Progress::poll_if_free() {
  if (num_wanting_lock_.load() > 0) return false;
  bool moved = false;
  exclusively_if_free([&] {
    if (now_ns() - sockets_polled_ns_.load() > kSocketPeriodNs) poll_all_sockets();
    moved = poll_all();
  });
  return moved;
}

// After listen(). Waits for the lock: what its holder has left, or what came meanwhile, must not be slept over.
bool Progress::poll_before_sleep() {
  std::vector<std::shared_ptr<void>> dropped;  // outlives the lock
  const std::lock_guard lock(mutex_);
  poll_all_sockets();
  const bool moved = poll_all();
  dropped.swap(to_drop_);
  return moved;
}

std::int64_t Progress::sleep_limit_ns() const { return std::min(kMaxSleepNs, due_ns_.load() - now_ns()); }

void Progress::call_comm_thread() {
  calls_.fetch_add(1);
  if (stands_by_.load()) futex_wake_private(calls_);
}

void Progress::kick_now() {
  kick();
  if (num_waiters_.load() == 0) call_comm_thread();
}

void Progress::leave(std::int64_t entered_ns) {
  if (num_waiters_.fetch_sub(1) > 1) return kick();  // another one polls from now on
  // After a long wait the comm thread may stand by for long.
  if (num_open_.load() > 0 || now_ns() - entered_ns > kStandByNs) call_comm_thread();
}

bool Progress::wait_until(const std::function<bool()>& done, std::int64_t deadline_ns,
                          const InterruptCheck& interrupt) {
  if (done()) return true;
  struct Waiting {
    Progress& progress;
    std::int64_t entered_ns = now_ns();
    ~Waiting() { progress.leave(entered_ns); }
  };
  num_waits_.fetch_add(1);
  num_waiters_.fetch_add(1);
  const Waiting waiting{*this};
  std::int64_t spin_until = waiting.entered_ns + kSpinNs;
  std::int64_t interrupt_at = waiting.entered_ns + kMaxSleepNs;
  while (true) {
    const bool moved = poll_if_free();
    if (done()) return true;
    const std::int64_t now = now_ns();
    if (now >= deadline_ns) return false;
    if (interrupt && now >= interrupt_at) {
      interrupt();
      interrupt_at = now + kMaxSleepNs;
    }
    if (moved) spin_until = now + kSpinNs;
    if (moved) continue;
    if (now < spin_until) {
      ::sched_yield();
      continue;
    }
    const std::uint32_t seen = doorbell_.listen();
    if (poll_before_sleep() || done()) {
      doorbell_.stop_listening();
      continue;
    }
    doorbell_.sleep(seen, std::chrono::nanoseconds(std::min(sleep_limit_ns(), deadline_ns - now)));
  }
}

// While threads wait, or did so a moment ago, they move everything. False: it is the comm thread's turn.
bool Progress::stand_by() {
  const std::uint32_t calls = calls_.load();
  const std::uint32_t num_waits = num_waits_.load();
  const bool is_led = num_waiters_.load() > 0;
  if (!is_led && num_waits == num_waits_seen_) return false;
  const bool is_same_wait = is_led && num_waits == num_waits_seen_;
  stand_by_ns_ = is_same_wait ? std::min(2 * stand_by_ns_, kMaxSleepNs) : kStandByNs;
  num_waits_seen_ = num_waits;
  stands_by_.store(true);
  futex_wait_private(calls_, calls, std::chrono::nanoseconds(stand_by_ns_));
  stands_by_.store(false);
  return num_waiters_.load() > 0 || calls_.load() == calls;
}

void Progress::run() {
  ::pthread_setname_np(::pthread_self(), "pipecomm");
  ::prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // emulated arrivals are due to the microsecond
  const DeviceScope scope;                            // the thread is ours, and so is its device
  while (true) {
    if (stand_by()) continue;
    if (poll_if_free()) continue;
    const std::uint32_t seen = doorbell_.listen();
    if (poll_before_sleep()) {
      doorbell_.stop_listening();
      continue;
    }
    doorbell_.sleep(seen, std::chrono::nanoseconds(sleep_limit_ns()));
  }
}

}  // namespace pipecomm
