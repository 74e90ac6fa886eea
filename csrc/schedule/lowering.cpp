// A receive is posted before the action that uses the previous message of its channel.
#include "schedule/lowering.h"

#include <algorithm>

namespace pipecomm::schedule {
namespace {

// The receives of one rank's list, chained by the position before which they are posted.
class Posts {
 public:
  Posts(const Lists& lists, const Hops& hops, std::span<const Action> row, std::vector<std::int64_t>& previous)
      : first_(row.size(), -1), last_(row.size(), -1), next_(row.size(), -1) {
    std::vector<std::int32_t> channels;
    for (std::size_t position = 0; position < row.size(); ++position) {
      const Hop hop = hops.in(lists.traits(row[position]), row[position].stage);
      if (!hop.is_message()) continue;
      std::int64_t& used = previous[static_cast<std::size_t>(hop.channel)];
      if (used < 0) channels.push_back(hop.channel);
      const auto posted =
          static_cast<std::size_t>(used < 0 ? std::max<std::int64_t>(0, std::int64_t(position) - 1) : used);
      (first_[posted] < 0 ? first_[posted] : next_[static_cast<std::size_t>(last_[posted])]) = std::int64_t(position);
      last_[posted] = std::int64_t(position);
      used = std::int64_t(position);
    }
    for (const std::int32_t channel : channels) previous[static_cast<std::size_t>(channel)] = -1;
  }

  std::int64_t first(std::size_t position) const { return first_[position]; }
  std::int64_t next(std::int64_t use) const { return next_[static_cast<std::size_t>(use)]; }

 private:
  std::vector<std::int64_t> first_, last_, next_;
};

}  // namespace

Lowered lower(const Lists& lists) {
  const Hops hops(lists);
  // By channel: where the rank at hand last used a message of it.
  std::vector<std::int64_t> previous(static_cast<std::size_t>(hops.num_channels()), -1);
  Lowered lowered;
  lowered.actions.reserve(lists.rows.actions.size() * 3);
  lowered.offsets.push_back(0);
  for (std::int64_t rank = 0; rank < lists.rows.num_ranks(); ++rank) {
    const std::span<const Action> row = lists.rows.of(rank);
    const Posts posts(lists, hops, row, previous);
    for (std::size_t position = 0; position < row.size(); ++position) {
      for (std::int64_t use = posts.first(position); use >= 0; use = posts.next(use)) {
        const Action& user = row[static_cast<std::size_t>(use)];
        lowered.actions.push_back({lists.receives[lists.traits(user).direction], user.stage, user.microbatch});
      }
      const Action& action = row[position];
      lowered.actions.push_back(action);
      const KindTraits& traits = lists.traits(action);
      if (hops.out(traits, action.stage).is_message()) {
        lowered.actions.push_back({lists.sends[traits.direction], action.stage, action.microbatch});
      }
    }
    lowered.offsets.push_back(static_cast<std::int64_t>(lowered.actions.size()));
  }
  return lowered;
}

}  // namespace pipecomm::schedule
