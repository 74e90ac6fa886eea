// Refuses numbers that lead nowhere; numbers the channels: one for each direction and pair of ranks that stages next
// to each other are on.
#include "schedule/lists.h"

#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.h"

namespace pipecomm::schedule {
namespace {

void require(bool holds, const std::string& expected) {
  if (!holds) throw Error(ErrorKind::config, "expected " + expected);
}

// The message is made for the number that is refused only: there are millions.
void require_within(std::int64_t value, std::int64_t first, std::int64_t end, const char* what) {
  if (value >= first && value < end) return;
  require(false, std::string(what) + " from " + std::to_string(first) + " to " + std::to_string(end - 1) + "; got " +
                     std::to_string(value));
}

}  // namespace

void check_rows(const Lists& lists) {
  const std::span<const std::int64_t> offsets = lists.rows.offsets;
  const auto num_actions = static_cast<std::int64_t>(lists.rows.actions.size());
  require(!offsets.empty() && offsets.front() == 0 && offsets.back() == num_actions,
          "offsets from 0 to the number of actions, " + std::to_string(num_actions));
  for (std::size_t rank = 1; rank < offsets.size(); ++rank) {
    require_within(offsets[rank], offsets[rank - 1], num_actions + 1, "offsets that do not fall");
  }
  // Sets of kinds are the bits of an int32.
  const auto num_kinds = static_cast<std::int64_t>(lists.kinds.size());
  require_within(num_kinds, 1, 32, "numbers of kinds");
  for (const KindTraits& traits : lists.kinds) {
    require_within(traits.role, KindTraits::compute, KindTraits::receive + 1, "roles");
    require_within(traits.direction, -1, kNumDirections, "directions");
  }
  for (const Action& action : lists.rows.actions) require_within(action.kind, 0, num_kinds, "kinds");
}

void check_ways(const Lists& lists) {
  const auto num_stages = static_cast<std::int64_t>(lists.ways.rank_of.size());
  for (const std::int32_t rank : lists.ways.rank_of) require_within(rank, 0, lists.rows.num_ranks(), "ranks");
  for (int direction = 0; direction < kNumDirections; ++direction) {
    for (const auto& ways : {lists.ways.source[direction], lists.ways.target[direction]}) {
      for (const std::int32_t stage : ways) require_within(stage, -1, num_stages, "stages next to each other");
    }
    for (const auto& [kind, role] : {std::pair{lists.sends[direction], KindTraits::send},
                                     std::pair{lists.receives[direction], KindTraits::receive}}) {
      require_within(kind, 0, static_cast<std::int64_t>(lists.kinds.size()), "kinds");
      const KindTraits& traits = lists.kinds[static_cast<std::size_t>(kind)];
      require(traits.role == role && traits.direction == direction, "kinds that send and receive in each direction");
    }
  }
  for (const Action& action : lists.rows.actions) {
    require_within(action.stage, 0, num_stages, "stages");
    require_within(action.microbatch, 0, std::int64_t(1) << 31, "microbatches");
    require(lists.traits(action).role == KindTraits::compute, "compute only; sends and receives are derived");
  }
}

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
