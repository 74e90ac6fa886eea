// Every lowered list is walked until it must wait; a transfer that becomes possible wakes those who wait for it.
// Each action is handled once and waits at most once.
#include "schedule/walk.h"

#include <algorithm>
#include <deque>

#include "schedule/lowering.h"

namespace pipecomm::schedule {
namespace {

constexpr std::int64_t kActionsPerReport = 1 << 20;

// Messages from one rank to another in one direction, whatever their stages.
// The n-th send meets the n-th receive, which the n-th compute action that takes one waits for.
class Channel {
 public:
  Channel(std::int64_t slots, std::int64_t max_in_flight)
      : posted_s_(static_cast<std::size_t>(slots), 0.0), max_in_flight_(static_cast<std::size_t>(max_in_flight)) {}

  // Both say whether a transfer begins.
  bool post(double now_s) {
    posted_s_.push_back(now_s);
    return begin_transfer();
  }
  bool send(const Action& action, std::int32_t rank, double now_s, double transfer_s, double latency_s) {
    sends.push_back(action);
    sender = rank;
    made_.push_back({now_s, transfer_s, latency_s});
    return begin_transfer();
  }

  // The ranks that wait for a transfer to begin.
  std::vector<std::int32_t> waiting;
  std::vector<Action> sends;
  std::int32_t sender = -1;
  std::size_t num_used = 0;
  // Per message: both sides were ready, it entered the link, it left the link, it arrived.
  std::vector<double> ready_s, start_s, left_s, arrived_s;

 private:
  struct Made {
    double now_s, transfer_s, latency_s;
  };

  bool begin_transfer() {
    const std::size_t index = left_s.size();
    if (made_.empty() || index == posted_s_.size()) return false;
    const Made made = made_.front();
    made_.pop_front();
    const double ready = std::max(made.now_s, posted_s_[index]);
    double start = index > 0 ? std::max(ready, left_s.back()) : ready;
    if (max_in_flight_ > 0 && index >= max_in_flight_) start = std::max(start, arrived_s[index - max_in_flight_]);
    ready_s.push_back(ready);
    start_s.push_back(start);
    left_s.push_back(start + made.transfer_s);
    arrived_s.push_back(start + made.transfer_s + made.latency_s);
    return true;
  }

  // The first messages find slots, each later one a receive posted so much earlier.
  std::vector<double> posted_s_;
  std::deque<Made> made_;
  std::size_t max_in_flight_;
};

class Walker {
 public:
  Walker(const Lists& lists, const Timing& timing, const Progress& progress)
      : lists_(lists), timing_(timing), progress_(progress), hops_(lists), lowered_(lower(lists)) {
    const auto num_ranks = static_cast<std::size_t>(lists.rows.num_ranks());
    for (auto* values : {&result_.clock_s, &result_.busy_s, &result_.exposed_comm_s}) values->assign(num_ranks, 0.0);
    result_.start_s.assign(lists.rows.actions.size(), 0.0);
    next_start_.assign(lists.rows.offsets.begin(), lists.rows.offsets.end() - 1);
    positions_.assign(lowered_.offsets.begin(), lowered_.offsets.end() - 1);
    held_.assign(num_ranks, {-1, 0});
    channels_.assign(static_cast<std::size_t>(hops_.num_channels()), Channel(timing.slots, timing.max_in_flight));
    made_.resize(kNumDirections * lists.ways.rank_of.size());
    for (std::size_t rank = 0; rank < num_ranks; ++rank) ready_.push_back(static_cast<std::int32_t>(rank));
  }

  Walk run() {
    while (!ready_.empty()) {
      const std::int32_t rank = ready_.front();
      ready_.pop_front();
      advance(static_cast<std::size_t>(rank));
    }
    note_stuck();
    if (result_.stuck_at.empty()) collect_messages();
    return std::move(result_);
  }

 private:
  struct Held {
    std::int32_t channel;
    std::size_t index;
  };

  void advance(std::size_t rank) {
    while (release(rank) && positions_[rank] < lowered_.offsets[rank + 1]) {
      const Action& action = lowered_.actions[static_cast<std::size_t>(positions_[rank])];
      const KindTraits& traits = lists_.traits(action);
      if (traits.role != KindTraits::compute) {
        post(rank, action, traits);
      } else if (!compute(rank, action, traits)) {
        return;
      }
      ++positions_[rank];
      if (progress_ && ++num_done_ % kActionsPerReport == 0) {
        progress_(static_cast<double>(num_done_) / static_cast<double>(lowered_.actions.size()));
      }
    }
  }

  // False while the rank's own blocking send has not left.
  bool release(std::size_t rank) {
    const Held held = held_[rank];
    if (held.channel < 0) return true;
    Channel& channel = channels_[static_cast<std::size_t>(held.channel)];
    if (held.index >= channel.left_s.size()) {
      channel.waiting.push_back(static_cast<std::int32_t>(rank));
      return false;
    }
    stand_still(rank, channel.ready_s[held.index], channel.left_s[held.index]);
    held_[rank].channel = -1;
    return true;
  }

  // Wait for a transfer; what of the wait was spent on the link is exposed communication.
  void stand_still(std::size_t rank, double ready_s, double until_s) {
    double& clock_s = result_.clock_s[rank];
    result_.exposed_comm_s[rank] += std::max(0.0, until_s - std::max(clock_s, ready_s));
    clock_s = std::max(clock_s, until_s);
  }

  void post(std::size_t rank, const Action& action, const KindTraits& traits) {
    const auto stage = static_cast<std::size_t>(action.stage);
    const bool is_send = traits.role == KindTraits::send;
    const Hop hop = is_send ? hops_.out(traits, action.stage) : hops_.in(traits, action.stage);
    Channel& channel = channels_[static_cast<std::size_t>(hop.channel)];
    const double now_s = result_.clock_s[rank];
    bool begins = false;
    if (is_send) {
      begins = channel.send(action, static_cast<std::int32_t>(rank), now_s, timing_.transfer_s[traits.direction][stage],
                            timing_.latency_s[traits.direction][stage]);
      if (timing_.sends_block) held_[rank] = {hop.channel, channel.sends.size() - 1};
    } else {
      begins = channel.post(now_s);
    }
    if (!begins) return;
    ready_.insert(ready_.end(), channel.waiting.begin(), channel.waiting.end());
    channel.waiting.clear();
  }

  // Run a compute action if its input is there; false if it must wait.
  bool compute(std::size_t rank, const Action& action, const KindTraits& traits) {
    const Hop from = hops_.in(traits, action.stage);
    if (from.is_message() && !take(rank, channels_[static_cast<std::size_t>(from.channel)])) return false;
    // If the rank makes it later, nothing can wake it.
    if (from.exists() && !from.is_message() && !was_made(traits.direction, from.source, action.microbatch))
      return false;
    const std::size_t num_stages = lists_.ways.rank_of.size();
    const double seconds =
        timing_.compute_s[static_cast<std::size_t>(action.kind) * num_stages + static_cast<std::size_t>(action.stage)];
    result_.start_s[static_cast<std::size_t>(next_start_[rank]++)] = result_.clock_s[rank];
    result_.clock_s[rank] += seconds;
    result_.busy_s[rank] += seconds;
    const Hop to = hops_.out(traits, action.stage);
    if (to.exists() && !to.is_message()) note_made(traits.direction, action);
    return true;
  }

  bool take(std::size_t rank, Channel& channel) {
    const std::size_t index = channel.num_used;
    if (index >= channel.left_s.size()) {
      channel.waiting.push_back(static_cast<std::int32_t>(rank));
      return false;
    }
    ++channel.num_used;
    stand_still(rank, channel.ready_s[index], channel.arrived_s[index]);
    return true;
  }

  std::vector<bool>& made_by(std::int32_t direction, std::int32_t stage) {
    return made_[static_cast<std::size_t>(direction) * lists_.ways.rank_of.size() + static_cast<std::size_t>(stage)];
  }
  bool was_made(std::int32_t direction, std::int32_t stage, std::int32_t microbatch) {
    const std::vector<bool>& made = made_by(direction, stage);
    return static_cast<std::size_t>(microbatch) < made.size() && made[static_cast<std::size_t>(microbatch)];
  }
  void note_made(std::int32_t direction, const Action& action) {
    std::vector<bool>& made = made_by(direction, action.stage);
    const auto microbatch = static_cast<std::size_t>(action.microbatch);
    if (made.size() <= microbatch) made.resize(std::max(microbatch + 1, 2 * made.size()));
    made[microbatch] = true;
  }

  void note_stuck() {
    std::vector<std::int64_t> stuck_at(positions_.size(), -1);
    bool is_stuck = false;
    for (std::size_t rank = 0; rank < positions_.size(); ++rank) {
      const bool is_held = held_[rank].channel >= 0;
      if (!is_held && positions_[rank] == lowered_.offsets[rank + 1]) continue;
      stuck_at[rank] = positions_[rank] - lowered_.offsets[rank] - (is_held ? 1 : 0);
      is_stuck = true;
    }
    if (is_stuck) result_.stuck_at = std::move(stuck_at);
  }

  void collect_messages() {
    for (Channel& channel : channels_) {
      result_.sends.insert(result_.sends.end(), channel.sends.begin(), channel.sends.end());
      result_.senders.insert(result_.senders.end(), channel.sends.size(), channel.sender);
      result_.message_start_s.insert(result_.message_start_s.end(), channel.start_s.begin(), channel.start_s.end());
      result_.message_end_s.insert(result_.message_end_s.end(), channel.arrived_s.begin(), channel.arrived_s.end());
      channel = Channel(0, 0);
    }
  }

  const Lists& lists_;
  const Timing& timing_;
  const Progress& progress_;
  const Hops hops_;
  const Lowered lowered_;
  Walk result_;
  std::vector<std::int64_t> positions_, next_start_;
  std::vector<Held> held_;
  std::deque<std::int32_t> ready_;
  std::vector<Channel> channels_;
  // By direction and stage: the microbatches whose result is in the memory of its rank.
  std::vector<std::vector<bool>> made_;
  std::int64_t num_done_ = 0;
};

}  // namespace

Walk walk(const Lists& lists, const Timing& timing, const Progress& progress) {
  return Walker(lists, timing, progress).run();
}

}  // namespace pipecomm::schedule
