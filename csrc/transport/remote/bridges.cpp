// Each call goes to the bridge it concerns, or to all.
#include "transport/remote/bridges.h"

#include <utility>

namespace pipecomm {

void Bridges::add(std::size_t peer, Fd stream, const std::string& endpoint, const FlowLimits& limits) {
  bridges_[peer] = std::make_unique<Bridge>(std::move(stream), endpoint, limits);
}

void Bridges::fill(std::vector<std::optional<Lifeline>>& lifelines) {
  for (const auto& [peer, bridge] : bridges_) lifelines[peer].emplace(bridge->take_lifeline());
}

std::string Bridges::endpoint(int peer) const {
  const auto item = bridges_.find(static_cast<std::size_t>(peer));
  return item == bridges_.end() ? "" : item->second->endpoint();
}

bool Bridges::has_hung_up(int peer) const {
  const auto item = bridges_.find(static_cast<std::size_t>(peer));
  return item != bridges_.end() && item->second->has_hung_up();
}

void Bridges::finish() {
  const auto deadline = std::chrono::steady_clock::now() + kFinishTimeout;
  for (const auto& [peer, bridge] : bridges_) bridge->finish(deadline);
}

void Bridges::forget_after_fork() noexcept {
  for (const auto& [peer, bridge] : bridges_) bridge->forget_after_fork();
}

}  // namespace pipecomm
