// Numbers the channels: one for each direction and pair of ranks that stages next to each other are on.
#include "schedule/lists.h"

#include <map>
#include <tuple>

namespace pipecomm::schedule {

Hops::Hops(const Lists& lists) {
  const Ways& ways = lists.ways;
  const auto num_stages = static_cast<std::int32_t>(ways.rank_of.size());
  std::map<std::tuple<int, std::int32_t, std::int32_t>, std::int32_t> channels;
  for (int direction = 0; direction < kNumDirections; ++direction) {
    into_[direction].resize(ways.rank_of.size());
    out_of_[direction].resize(ways.rank_of.size());
    for (std::int32_t stage = 0; stage < num_stages; ++stage) {
      const std::int32_t target = ways.target[direction][static_cast<std::size_t>(stage)];
      if (target < 0) continue;
      const std::int32_t sender = ways.rank_of[static_cast<std::size_t>(stage)];
      const std::int32_t receiver = ways.rank_of[static_cast<std::size_t>(target)];
      Hop hop{stage, target, -1};
      if (sender != receiver) {
        const auto [place, is_new] = channels.try_emplace({direction, sender, receiver}, num_channels_);
        if (is_new) ++num_channels_;
        hop.channel = place->second;
      }
      out_of_[direction][static_cast<std::size_t>(stage)] = hop;
      into_[direction][static_cast<std::size_t>(target)] = hop;
    }
  }
}

}  // namespace pipecomm::schedule
