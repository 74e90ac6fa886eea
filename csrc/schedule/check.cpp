// One pass over the lists for each question.
#include "schedule/check.h"

#include <bit>
#include <unordered_map>
#include <vector>

namespace pipecomm::schedule {
namespace {

// Which kinds ran, as bits, by stage and microbatch. A table where most of it will be used; a mistyped microbatch can
// make it enormous.
class Seen {
 public:
  Seen(std::int64_t num_stages, std::int64_t num_microbatches, std::size_t num_actions)
      : num_microbatches_(num_microbatches) {
    const std::int64_t size = num_stages * num_microbatches;
    if (size <= 4 * static_cast<std::int64_t>(num_actions) + 4096) table_.resize(static_cast<std::size_t>(size));
  }

  std::uint32_t& of(const Action& action) {
    const std::int64_t key = action.stage * num_microbatches_ + action.microbatch;
    return table_.empty() ? sparse_[key] : table_[static_cast<std::size_t>(key)];
  }

 private:
  std::int64_t num_microbatches_;
  std::vector<std::uint32_t> table_;
  std::unordered_map<std::int64_t, std::uint32_t> sparse_;
};

std::optional<Fault> wrong_size(const Lists& lists, const Action& action, std::int32_t num_stages,
                                std::int32_t num_microbatches) {
  if (lists.traits(action).role != KindTraits::compute) return Fault{Fault::not_compute, 0, 0};
  if (action.stage < 0 || action.stage >= num_stages) return Fault{Fault::wrong_stage, 0, 0};
  if (action.microbatch < 0 || action.microbatch >= num_microbatches) return Fault{Fault::wrong_microbatch, 0, 0};
  return {};
}

std::optional<Fault> wrong_order(const KindTraits& traits, std::int32_t kind, std::uint32_t ran) {
  if (ran & (1u << kind)) return Fault{Fault::twice, 0, 0};
  const std::uint32_t rivals = ran & static_cast<std::uint32_t>(traits.rivals);
  if (rivals != 0) return Fault{Fault::rival, 0, std::countr_zero(rivals)};
  if (traits.after != 0 && (ran & static_cast<std::uint32_t>(traits.after)) == 0) return Fault{Fault::too_early, 0, 0};
  return {};
}

}  // namespace

std::optional<Fault> find_fault(const Lists& lists, std::int32_t num_stages, std::int32_t num_microbatches) {
  Seen seen(num_stages, num_microbatches, lists.rows.actions.size());
  std::unordered_map<std::int32_t, std::int32_t> owners;
  std::int64_t index = 0;
  for (std::int64_t rank = 0; rank < lists.rows.num_ranks(); ++rank) {
    std::int32_t owned = -1;
    for (const Action& action : lists.rows.of(rank)) {
      std::optional<Fault> fault = wrong_size(lists, action, num_stages, num_microbatches);
      if (!fault && action.stage != owned) {
        const auto [owner, is_new] = owners.try_emplace(action.stage, static_cast<std::int32_t>(rank));
        if (owner->second != rank) fault = Fault{Fault::second_rank, 0, owner->second};
        owned = action.stage;
      }
      if (!fault) {
        std::uint32_t& ran = seen.of(action);
        fault = wrong_order(lists.traits(action), action.kind, ran);
        ran |= 1u << action.kind;
      }
      if (fault) {
        fault->index = index;
        return fault;
      }
      ++index;
    }
  }
  return {};
}

std::optional<Misorder> find_misorder(const Lists& lists) {
  const Hops hops(lists);
  std::vector<std::vector<std::int64_t>> made(static_cast<std::size_t>(hops.num_channels()));
  const auto num_actions = static_cast<std::int64_t>(lists.rows.actions.size());
  for (std::int64_t index = 0; index < num_actions; ++index) {
    const Action& action = lists.rows.actions[static_cast<std::size_t>(index)];
    const Hop hop = hops.out(lists.traits(action), action.stage);
    if (hop.is_message()) made[static_cast<std::size_t>(hop.channel)].push_back(index);
  }
  std::vector<std::int64_t> used(made.size(), 0);
  for (std::int64_t index = 0; index < num_actions; ++index) {
    const Action& action = lists.rows.actions[static_cast<std::size_t>(index)];
    const Hop hop = hops.in(lists.traits(action), action.stage);
    if (!hop.is_message()) continue;
    const auto channel = static_cast<std::size_t>(hop.channel);
    const std::int64_t sent_index = made[channel][static_cast<std::size_t>(used[channel])];
    const Action& sent = lists.rows.actions[static_cast<std::size_t>(sent_index)];
    if (sent.stage != hop.source || sent.microbatch != action.microbatch) {
      return Misorder{index, sent_index, used[channel]};
    }
    ++used[channel];
  }
  return {};
}

}  // namespace pipecomm::schedule
