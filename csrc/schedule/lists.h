// The lists of a schedule as numbers: actions, what their kinds mean, and which stage is next to which.
// Kinds and neighbours come from the caller: no letter and no "stage plus one" is known here.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/api.h"

namespace pipecomm::schedule {

inline constexpr int kNumDirections = 2;

struct Action {
  std::int32_t kind;
  std::int32_t stage;
  std::int32_t microbatch;
};

struct KindTraits {
  enum Role : std::int32_t { compute, send, receive };
  std::int32_t role;
  // Of the message it takes and makes: 0 or 1; -1: none.
  std::int32_t direction;
  // Bit k: kind k may be the one that must have run before; 0: none must.
  std::int32_t after;
  // Bit k: kind k makes the same result, so a stage runs one of them per microbatch.
  std::int32_t rivals;
};

// actions[offsets[r]] up to actions[offsets[r + 1]] are those of rank r.
struct Rows {
  std::span<const Action> actions;
  std::span<const std::int64_t> offsets;

  std::int64_t num_ranks() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
  std::span<const Action> of(std::int64_t rank) const {
    const auto first = static_cast<std::size_t>(offsets[static_cast<std::size_t>(rank)]);
    const auto end = static_cast<std::size_t>(offsets[static_cast<std::size_t>(rank) + 1]);
    return actions.subspan(first, end - first);
  }
};

// By stage. source and target: whose result it takes and who takes its own, by direction; -1: nobody.
struct Ways {
  std::span<const std::int32_t> rank_of;
  std::span<const std::int32_t> source[kNumDirections];
  std::span<const std::int32_t> target[kNumDirections];
};

struct Lists {
  Rows rows;
  std::span<const KindTraits> kinds;
  Ways ways;
  // The kinds that send and receive in a direction.
  std::int32_t sends[kNumDirections];
  std::int32_t receives[kNumDirections];

  const KindTraits& traits(const Action& action) const { return kinds[static_cast<std::size_t>(action.kind)]; }
};

// Both throw a config error for numbers that would be used as indices into a table and are out of range.
// What every function of lists relies on: rows within the actions, kinds within their table.
PC_API void check_rows(const Lists& lists);
// And what functions that follow results rely on: compute only, on stages whose neighbours are stages.
PC_API void check_ways(const Lists& lists);

// Where a result goes: from one stage to another, over a channel if they are on different ranks.
struct Hop {
  std::int32_t source = -1;
  std::int32_t target = -1;
  // Its number, or -1 where it stays in the memory of its rank.
  std::int32_t channel = -1;

  bool exists() const { return source >= 0; }
  bool is_message() const { return channel >= 0; }
};

// All hops, by direction and stage. Messages of one direction between the same two ranks share a channel.
class Hops {
 public:
  explicit Hops(const Lists& lists);

  // The way of what an action takes; of what it makes.
  Hop in(const KindTraits& traits, std::int32_t stage) const { return find(into_, traits.direction, stage); }
  Hop out(const KindTraits& traits, std::int32_t stage) const { return find(out_of_, traits.direction, stage); }
  std::int32_t num_channels() const { return num_channels_; }

 private:
  using Table = std::vector<Hop>[kNumDirections];

  static Hop find(const Table& table, std::int32_t direction, std::int32_t stage) {
    return direction < 0 ? Hop{} : table[direction][static_cast<std::size_t>(stage)];
  }

  Table into_;
  Table out_of_;
  std::int32_t num_channels_ = 0;
};

}  // namespace pipecomm::schedule
