// What holds for all links of a communicator.
#include "transport/group/link_set.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "transport/progress/progress.h"

namespace pipecomm {
namespace {

// A peer that asks for a lent tensor, or has room to park it, takes it in less.
constexpr Nanoseconds kFinishLent = std::chrono::milliseconds(500);

}  // namespace

void LinkSet::fail_if(const Predicate& predicate, const Error& error, bool forget) {
  for (const auto& receive : inbox_.take_if(predicate)) receive->fail(error);
  for_each([&](Link& link) {
    if (link.receiver().is_current(predicate)) link.receiver().fail_current(error);
    link.sender().fail_if(predicate, error, forget);
  });
}

bool LinkSet::can_only_wait_for(const TransferState& receive, int gone_peer) const {
  if (receive.peer() != kAnySource) return receive.peer() == gone_peer;
  return std::all_of(links_.begin(), links_.end(),
                     [](const auto& link) { return !link || (link->gone() && link->receiver().is_over()); });
}

std::string LinkSet::also_gone(int peer, const Bridges& bridges) const {
  std::string text;
  for_each([&](Link& link) {
    if (link.peer() == peer) return;
    if (!link.gone() && !link.lifeline().has_hung_up() && !bridges.has_hung_up(link.peer())) return;
    text += (text.empty() ? "; also gone: rank " : ", ") + std::to_string(link.peer());
  });
  return text;
}

void LinkSet::throw_if_gone() const {
  for_each([](const Link& link) {
    if (link.gone()) throw Error(*link.gone());
  });
}

void LinkSet::wait_for_all(Nanoseconds timeout, bool (Link::*is_finished)() const) const {
  const auto are_finished = [&] {
    bool result = true;
    Progress::instance().exclusively(
        [&] { for_each([&](const Link& link) { result &= link.gone() || (link.*is_finished)(); }); });
    return result;
  };
  const std::int64_t deadline = now_ns() + timeout.count();
  while (!are_finished() && now_ns() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void LinkSet::finish(Nanoseconds timeout) const {
  wait_for_all(timeout, &Link::is_idle);
  wait_for_all(std::min(timeout, kFinishLent), &Link::has_lent_nothing);
}

// Their streams write the slots of a late peer when it has read what is there, and not before.
void LinkSet::end(Links links, std::shared_ptr<void> owner) {
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
