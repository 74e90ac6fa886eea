// The replay loop.
#include "replay/replay.h"

#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "replay/policy.h"

namespace pipecomm {
namespace {

[[noreturn]] void refuse(std::size_t event, const std::string& expected, std::int64_t got) {
  throw Error(ErrorKind::config, "event " + std::to_string(event) + " of the trace: expected " + expected + "; got " +
                                     std::to_string(got));
}

// Gives slots of freed blocks to later ones.
class Slots {
 public:
  std::uint32_t add(std::int64_t id, std::size_t event) {
    const auto [place, is_new] = slots_.try_emplace(id, 0);
    if (!is_new) refuse(event, "an id that is not live", id);
    if (free_.empty()) free_.push_back(count_++);
    place->second = free_.back();
    free_.pop_back();
    return place->second;
  }
  std::uint32_t remove(std::int64_t id, std::size_t event) {
    const auto found = slots_.find(id);
    if (found == slots_.end()) refuse(event, "a free of a live id", id);
    const std::uint32_t slot = found->second;
    free_.push_back(slot);
    slots_.erase(found);
    return slot;
  }
  std::size_t count() const { return count_; }

 private:
  std::unordered_map<std::int64_t, std::uint32_t> slots_;
  std::vector<std::uint32_t> free_;
  std::uint32_t count_ = 0;
};

class Samples {
 public:
  Samples(std::size_t num_events, std::size_t num_samples, ReplayResult& result)
      : per_sample_(num_samples == 0 ? 0 : (num_events + num_samples - 1) / num_samples), result_(result) {}

  void add(std::size_t event, std::size_t live, std::size_t reserved) {
    if (per_sample_ == 0) return;
    if (event / per_sample_ >= result_.live_nbytes.size()) {
      result_.live_nbytes.push_back(live);
      result_.reserved_nbytes.push_back(reserved);
    }
    result_.live_nbytes.back() = std::max(result_.live_nbytes.back(), live);
    result_.reserved_nbytes.back() = std::max(result_.reserved_nbytes.back(), reserved);
  }

 private:
  const std::size_t per_sample_;
  ReplayResult& result_;
};

}  // namespace

ReplayTrace prepare_replay(std::span<const std::int64_t> ids, std::span<const std::int64_t> nbytes,
                           std::span<const std::int64_t> streams) {
  if (nbytes.size() != ids.size() || streams.size() != ids.size()) {
    throw Error(ErrorKind::config, "expected as many sizes and streams as ids, " + std::to_string(ids.size()) +
                                       "; got " + std::to_string(nbytes.size()) + " and " +
                                       std::to_string(streams.size()));
  }
  ReplayTrace trace;
  trace.events.reserve(ids.size());
  Slots slots;
  std::vector<std::size_t> sizes;
  std::size_t live = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (nbytes[i] < -1) refuse(i, "a size of at least 0, or -1 for a free,", nbytes[i]);
    const std::uint32_t slot = nbytes[i] >= 0 ? slots.add(ids[i], i) : slots.remove(ids[i], i);
    sizes.resize(slots.count());
    if (nbytes[i] >= 0) {
      sizes[slot] = static_cast<std::size_t>(nbytes[i]);
      live += sizes[slot];
      trace.peak_live_nbytes = std::max(trace.peak_live_nbytes, live);
    } else {
      live -= sizes[slot];
    }
    trace.events.push_back({slot, nbytes[i], streams[i]});
  }
  trace.num_slots = slots.count();
  return trace;
}

ReplayResult replay(const ReplayTrace& trace, const std::string& policy_name, std::size_t capacity_nbytes,
                    std::size_t num_samples) {
  ReplayResult result;
  const auto policy = make_policy(policy_name, trace.num_slots, capacity_nbytes);
  std::vector<std::size_t> sizes(trace.num_slots);
  Samples samples(trace.events.size(), num_samples, result);
  std::size_t live = 0;
  std::size_t reserved = 0;
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const auto& [slot, nbytes, stream] = trace.events[i];
    if (nbytes < 0) {
      policy->free(slot);  // none of them gives memory back at a free
      live -= sizes[slot];
    } else if (policy->allocate(slot, static_cast<std::size_t>(nbytes), stream)) {
      sizes[slot] = static_cast<std::size_t>(nbytes);
      live += sizes[slot];
      reserved = policy->reserved_nbytes();
      result.peak_reserved_nbytes = std::max(result.peak_reserved_nbytes, reserved);
    } else {
      result.failed_at = static_cast<std::int64_t>(i);
      break;
    }
    samples.add(i, live, reserved);
  }
  result.num_upstream_calls = policy->num_upstream_calls();
  return result;
}

}  // namespace pipecomm
