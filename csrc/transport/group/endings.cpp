// Receives that wait for a gone peer, and devices that are not done.
#include "transport/group/endings.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "transport/progress/progress.h"

namespace pipecomm {
namespace {

// A peer that asks for a lent tensor, or has room to park it, takes it in less.
constexpr Nanoseconds kFinishLent = std::chrono::milliseconds(500);

void wait_for_links(const Links& links, Nanoseconds timeout, bool (Link::*is_finished)() const) {
  const auto are_finished = [&] {
    bool result = true;
    Progress::instance().exclusively([&] {
      for (const auto& link : links) result &= !link || link->gone() || ((*link).*is_finished)();
    });
    return result;
  };
  const std::int64_t deadline = now_ns() + timeout.count();
  while (!are_finished() && now_ns() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

bool waits_for(const TransferState& receive, int gone_peer, const Links& links) {
  if (receive.peer() != kAnySource) return receive.peer() == gone_peer;
  for (const auto& link : links) {
    if (link && (!link->gone() || !link->receiver().is_over())) return false;
  }
  return true;
}

std::string also_gone(int peer, const Links& links) {
  std::string text;
  for (const auto& link : links) {
    if (!link || link->peer() == peer || !(link->gone() || link->lifeline().has_hung_up())) continue;
    text += (text.empty() ? "; also gone: rank " : ", ") + std::to_string(link->peer());
  }
  return text;
}

void throw_if_gone(const Links& links) {
  for (const auto& link : links) {
    if (link && link->gone()) throw Error(*link->gone());
  }
}

void finish_shared(const Links& links, Nanoseconds timeout) {
  wait_for_links(links, timeout, &Link::is_idle);
  wait_for_links(links, std::min(timeout, kFinishLent), &Link::has_lent_nothing);
}

// Their streams write the slots of a late peer when it has read what is there, and not before.
void end_links(Links links, std::shared_ptr<void> owner) {
  const auto end_those_that_may = [](Links& all) {
    std::erase_if(all, [](const auto& link) { return !link || link->may_end(); });
  };
  end_those_that_may(links);
  if (links.empty()) return;
  std::thread([=, left = std::move(links), kept = std::move(owner)]() mutable {
    for (; !left.empty(); end_those_that_may(left)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }).detach();
}

}  // namespace pipecomm
