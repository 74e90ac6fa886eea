// The bridges of one communicator, by rank.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/remote/bridge.h"

namespace pipecomm {

class Bridges {
 public:
  void add(std::size_t peer, Fd stream, const std::string& endpoint, const FlowLimits& limits);
  // Puts in the life lines that lead to the bridges.
  void fill(std::vector<std::optional<Lifeline>>& lifelines);
  // Where the peer is reached; empty for one on this host.
  std::string endpoint(int peer) const;
  // As Bridge::has_hung_up(); false for a peer on this host.
  bool has_hung_up(int peer) const;
  // Each as Bridge::finish, all within kFinishTimeout.
  void finish();
  void forget_after_fork() noexcept;

 private:
  std::map<std::size_t, std::unique_ptr<Bridge>> bridges_;
};

}  // namespace pipecomm
