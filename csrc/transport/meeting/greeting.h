// What ranks that meet demand of each other, on one host and on several, and how the meeting fails.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/api/options.h"

namespace pipecomm {

class Greeting {
 public:
  Greeting(int rank, std::size_t size, const CommunicatorOptions& options)
      : rank_(rank), size_(static_cast<int>(size)), options_(options) {}

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::string where() const { return " (rank " + std::to_string(rank_) + ", process group '" + options_.name + "')"; }

  // Throws a config error that names what differs. What else ranks must agree on, they compare before they meet.
  void check_same(std::uint32_t version, int size, int peer) const;
  // `others` have ended too, or have not been heard of: one of them may be why this peer has given up.
  [[noreturn]] void fail_lost(int peer, const std::vector<std::string>& others = {}) const;
  [[noreturn]] void fail_missing(const std::vector<std::string>& missing, Nanoseconds timeout) const;

 private:
  const int rank_;
  const int size_;
  const CommunicatorOptions& options_;
};

// Callers that have not said hello; beyond this the oldest is dropped, so that idle probes cannot use up descriptors.
inline constexpr std::size_t kMaxStrangers = 64;

}  // namespace pipecomm
