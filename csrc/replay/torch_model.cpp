// torch's caching allocator for CUDA (2.13), without settings: its size rules, best fit, splitting and segments, with
// and without expandable segments.
#include <algorithm>
#include <map>

#include "memory/block_list.h"
#include "memory/segment.h"
#include "replay/policy.h"

namespace pipecomm {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kMinBlock = 512;
constexpr std::size_t kSmallSize = kMiB;
constexpr std::size_t kSmallBuffer = 2 * kMiB;
constexpr std::size_t kLargeBuffer = 20 * kMiB;
constexpr std::size_t kMinLargeAlloc = 10 * kMiB;
constexpr std::size_t kRoundLarge = 2 * kMiB;
// Segments stand apart, so that no block joins one of another segment.
constexpr std::uintptr_t kApart = std::uintptr_t{1} << 12;
constexpr std::uintptr_t kExpandable = std::uintptr_t{1} << 46;

SegmentClass torch_class_of(std::size_t nbytes) {
  return nbytes <= kSmallSize ? SegmentClass::small : SegmentClass::large;
}

class TorchPolicy final : public Policy {
 public:
  TorchPolicy(std::size_t num_slots, std::size_t capacity_nbytes, bool is_expandable)
      : capacity_nbytes_(capacity_nbytes), is_expandable_(is_expandable), held_(num_slots) {}

  bool allocate(std::size_t slot, std::size_t nbytes, std::int64_t stream) override {
    const std::size_t block_nbytes = round_up(std::max(nbytes, kMinBlock), kMinBlock);
    PerStream& own = streams_.try_emplace(stream, is_expandable_).first->second;
    BlockNode* block = take(own, block_nbytes);
    if (block == nullptr && grow(own, block_nbytes)) block = take(own, block_nbytes);
    if (block == nullptr && give_back_free() && grow(own, block_nbytes)) block = take(own, block_nbytes);
    held_[slot] = {&own, block};
    return block != nullptr;
  }
  void free(std::size_t slot) override { held_[slot].stream->blocks.give_back(held_[slot].block); }
  std::size_t reserved_nbytes() const override { return reserved_nbytes_; }
  std::uint64_t num_upstream_calls() const override { return num_upstream_calls_; }

 private:
  struct PerStream {
    explicit PerStream(bool is_expandable) : blocks(is_expandable) {}
    BlockList blocks;
    // Ends of the expandable segments, by class; nullptr where there is none yet.
    std::byte* ends[2] = {nullptr, nullptr};
  };
  struct Held {
    PerStream* stream;
    BlockNode* block;
  };

  std::byte*& end_of(PerStream& own, std::size_t nbytes) { return own.ends[static_cast<int>(torch_class_of(nbytes))]; }

  BlockNode* take(PerStream& own, std::size_t nbytes) {
    const bool splits_always = is_expandable_ || torch_class_of(nbytes) == SegmentClass::small;
    const std::byte* tail = is_expandable_ ? end_of(own, nbytes) : nullptr;
    return own.blocks.take(nbytes, torch_class_of(nbytes), splits_always ? kMinBlock : kSmallSize + 1, tail);
  }

  bool grow(PerStream& own, std::size_t nbytes) {
    return is_expandable_ ? grow_expandable(own, nbytes) : add_segment(own, nbytes);
  }

  bool reserve(std::size_t nbytes) {
    if (capacity_nbytes_ > 0 && nbytes > capacity_nbytes_ - std::min(capacity_nbytes_, reserved_nbytes_)) return false;
    reserved_nbytes_ += nbytes;
    ++num_upstream_calls_;
    return true;
  }

  bool add_segment(PerStream& own, std::size_t nbytes) {
    std::size_t segment_nbytes = round_up(nbytes, kRoundLarge);
    if (nbytes < kMinLargeAlloc) segment_nbytes = kLargeBuffer;
    if (torch_class_of(nbytes) == SegmentClass::small) segment_nbytes = kSmallBuffer;
    if (!reserve(segment_nbytes)) return false;
    own.blocks.add(reinterpret_cast<std::byte*>(next_address_), segment_nbytes, torch_class_of(nbytes));
    next_address_ += segment_nbytes + kApart;
    return true;
  }

  // Maps whole buffers behind the last block, which counts where it is free.
  bool grow_expandable(PerStream& own, std::size_t nbytes) {
    std::byte*& end = end_of(own, nbytes);
    if (end == nullptr) {
      next_expandable_ += kExpandable;
      end = reinterpret_cast<std::byte*>(next_expandable_);
    }
    const GrowthPoint tail = own.blocks.growth_point(nbytes, torch_class_of(nbytes), 1,
                                                     [&](std::byte* data, std::size_t) { return data == end; });
    const std::size_t buffer = torch_class_of(nbytes) == SegmentClass::small ? kSmallBuffer : kLargeBuffer;
    const std::size_t mapped = round_up(nbytes - tail.before_nbytes, buffer);
    if (!reserve(mapped)) return false;
    own.blocks.add(end, mapped, torch_class_of(nbytes));
    end += mapped;
    return true;
  }

  // What torch does before it fails. Of an expandable segment only the tail is given back here: addresses that were
  // unmapped in the middle are not modelled.
  bool give_back_free() {
    const std::size_t before = reserved_nbytes_;
    for (auto& [stream, own] : streams_) {
      const auto pieces = is_expandable_ ? tails_of(own) : own.blocks.free_segments();
      for (const Piece& piece : pieces) {
        own.blocks.remove(piece.data, piece.nbytes);
        reserved_nbytes_ -= piece.nbytes;
        ++num_upstream_calls_;
      }
    }
    return reserved_nbytes_ < before;
  }

  std::vector<Piece> tails_of(PerStream& own) {
    std::vector<Piece> pieces;
    for (const Piece& run : own.blocks.free_runs(kRoundLarge, kRoundLarge)) {
      for (std::byte*& end : own.ends) {
        if (end != run.data + run.nbytes) continue;
        pieces.push_back(run);
        end = run.data;
      }
    }
    return pieces;
  }

  const std::size_t capacity_nbytes_;
  const bool is_expandable_;
  std::map<std::int64_t, PerStream> streams_;
  std::vector<Held> held_;  // by slot
  std::uintptr_t next_address_ = kApart;
  std::uintptr_t next_expandable_ = 0;
  std::size_t reserved_nbytes_ = 0;
  std::uint64_t num_upstream_calls_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_torch_policy(std::size_t num_slots, std::size_t capacity_nbytes, bool is_expandable) {
  return std::make_unique<TorchPolicy>(num_slots, capacity_nbytes, is_expandable);
}

}  // namespace pipecomm
