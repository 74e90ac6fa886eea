// The thread, which sleeps in epoll: a descriptor that is closed leaves it by itself.
#include "ways/release.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

namespace pipecomm {
namespace {

// What is let go is told so again this often.
constexpr int kPeriodMs = 1;

}  // namespace

void StreamRelease::now() {
  const std::lock_guard lock(mutex_);
  if (awaited_ == nullptr) return;
  if (!passed_) passed_ = awaited_->load();
  awaited_->store(kReleased);
}

std::uint64_t StreamRelease::passed() const {
  const std::lock_guard lock(mutex_);
  return passed_ ? *passed_ : awaited_->load();
}

void StreamRelease::end() {
  const std::lock_guard lock(mutex_);
  if (!passed_) passed_ = awaited_->load();
  awaited_ = nullptr;
}

ReleaseWatch& ReleaseWatch::instance() {
  static auto* watch = new ReleaseWatch;
  return *watch;
}

ReleaseWatch::ReleaseWatch() : epoll_fd_(::epoll_create1(EPOLL_CLOEXEC)) {
  std::thread([this] { run(); }).detach();
}

void ReleaseWatch::add(int lifeline_fd, std::shared_ptr<StreamRelease> release) {
  const std::lock_guard lock(mutex_);
  watched_.push_back({lifeline_fd, false, std::move(release)});
  epoll_event event{};
  event.events = EPOLLONESHOT;  // a hang-up is always told of, and here once
  event.data.fd = lifeline_fd;
  if (::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, lifeline_fd, &event) != 0) {
    ::epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, lifeline_fd, &event);
  }
}

void ReleaseWatch::remove(const StreamRelease* release) {
  const std::lock_guard lock(mutex_);
  std::erase_if(watched_, [&](const Watched& item) { return item.release.get() == release; });
}

void ReleaseWatch::hang_up(const StreamRelease* release) {
  const std::lock_guard lock(mutex_);
  for (Watched& item : watched_) {
    if (item.release.get() != release) continue;
    item.has_hung_up = true;
    item.release->now();
  }
}

bool ReleaseWatch::let_go() {
  bool is_any = false;
  for (const Watched& item : watched_) {
    if (item.has_hung_up) item.release->now();
    is_any |= item.has_hung_up;
  }
  return is_any;
}

void ReleaseWatch::run() {
  ::pthread_setname_np(::pthread_self(), "pipecomm-watch");
  for (bool is_any = false;;) {
    std::array<epoll_event, 16> events;
    const int count = ::epoll_wait(epoll_fd_, events.data(), events.size(), is_any ? kPeriodMs : 1000);
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if ((event.events & EPOLLHUP) == 0) continue;
      for (Watched& item : watched_) item.has_hung_up |= item.fd == event.data.fd;
    }
    is_any = let_go();
  }
}

WatchedRelease::WatchedRelease(int lifeline_fd, std::shared_ptr<StreamRelease> release) : release_(std::move(release)) {
  if (lifeline_fd >= 0) ReleaseWatch::instance().add(lifeline_fd, release_);
}

}  // namespace pipecomm
