// The policies by name, and the two short ones: this library's own pool, and size classes.
#include "replay/policy.h"

#include <algorithm>
#include <bit>
#include <map>

#include "base/error.h"
#include "memory/block_node.h"
#include "memory/pool.h"
#include "memory/segment.h"

namespace pipecomm {
namespace {

class PoolPolicy final : public Policy {
 public:
  PoolPolicy(std::size_t num_slots, std::size_t capacity_nbytes)
      : pool_(make_paper_upstream(0), capacity_nbytes), blocks_(num_slots) {}

  bool allocate(std::size_t slot, std::size_t nbytes, std::int64_t) override {
    try {
      blocks_[slot] = pool_.allocate_node(nbytes);
      return true;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::pool_exhausted) throw;
      return false;
    }
  }
  void free(std::size_t slot) override { pool_.deallocate_node(blocks_[slot]); }
  std::size_t reserved_nbytes() const override { return pool_.reserved_nbytes(); }
  std::uint64_t num_upstream_calls() const override { return pool_.num_upstream_calls(); }

 private:
  Pool pool_;
  std::vector<BlockNode*> blocks_;
};

// Sizes rounded up to four classes for each doubling, as jemalloc has them; what is freed serves its class alone.
class SizeClassPolicy final : public Policy {
 public:
  SizeClassPolicy(std::size_t num_slots, std::size_t capacity_nbytes)
      : capacity_nbytes_(capacity_nbytes), classes_(num_slots) {}

  bool allocate(std::size_t slot, std::size_t nbytes, std::int64_t) override {
    classes_[slot] = class_nbytes(nbytes);
    std::size_t& num_free = num_free_[classes_[slot]];
    if (num_free > 0) {
      --num_free;
      return true;
    }
    if (capacity_nbytes_ > 0 && classes_[slot] > capacity_nbytes_ - std::min(capacity_nbytes_, reserved_nbytes_)) {
      give_back_free();
      if (classes_[slot] > capacity_nbytes_ - std::min(capacity_nbytes_, reserved_nbytes_)) return false;
    }
    reserved_nbytes_ += classes_[slot];
    ++num_upstream_calls_;
    return true;
  }
  void free(std::size_t slot) override { ++num_free_[classes_[slot]]; }
  std::size_t reserved_nbytes() const override { return reserved_nbytes_; }
  std::uint64_t num_upstream_calls() const override { return num_upstream_calls_; }

 private:
  static std::size_t class_nbytes(std::size_t nbytes) {
    constexpr std::size_t kLeast = 512;
    if (nbytes <= kLeast) return kLeast;
    return round_up(nbytes, std::max(kLeast, std::bit_floor(nbytes - 1) / 4));
  }

  void give_back_free() {
    for (auto& [nbytes, count] : num_free_) {
      reserved_nbytes_ -= nbytes * count;
      num_upstream_calls_ += count;
      count = 0;
    }
  }

  const std::size_t capacity_nbytes_;
  std::vector<std::size_t> classes_;  // by slot
  std::map<std::size_t, std::size_t> num_free_;
  std::size_t reserved_nbytes_ = 0;
  std::uint64_t num_upstream_calls_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_pool_policy(std::size_t num_slots, std::size_t capacity_nbytes) {
  return std::make_unique<PoolPolicy>(num_slots, capacity_nbytes);
}

std::unique_ptr<Policy> make_size_class_policy(std::size_t num_slots, std::size_t capacity_nbytes) {
  return std::make_unique<SizeClassPolicy>(num_slots, capacity_nbytes);
}

std::vector<std::string> policy_names() { return {"pipecomm", "torch", "torch:expandable", "size-classes"}; }

std::unique_ptr<Policy> make_policy(const std::string& name, std::size_t num_slots, std::size_t capacity_nbytes) {
  if (name == "pipecomm") return make_pool_policy(num_slots, capacity_nbytes);
  if (name == "torch") return make_torch_policy(num_slots, capacity_nbytes, false);
  if (name == "torch:expandable") return make_torch_policy(num_slots, capacity_nbytes, true);
  if (name == "size-classes") return make_size_class_policy(num_slots, capacity_nbytes);
  throw Error(ErrorKind::config, "expected pipecomm, torch, torch:expandable or size-classes as policy; got " + name);
}

}  // namespace pipecomm
