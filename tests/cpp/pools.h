// Pools over every upstream, for the pool's tests.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "base/error.h"
#include "memory/block.h"

namespace pipecomm {

inline constexpr std::size_t kMiB = std::size_t{1} << 20;

// An upstream with a capacity and no way to remap, over the process's heap.
class HeapUpstream final : public Upstream {
 public:
  explicit HeapUpstream(std::size_t capacity_nbytes, bool waits_at_release = false)
      : left_nbytes_(capacity_nbytes), waits_at_release_(waits_at_release) {}
  ~HeapUpstream() override {
    for (const auto& [data, nbytes] : segments_) std::free(data);
  }
  std::size_t granule_nbytes() const override { return 4096; }
  std::byte* allocate(std::size_t nbytes, std::byte*) override {
    if (nbytes > left_nbytes_) throw Error(ErrorKind::pool_exhausted, "the heap is full");
    auto* data = static_cast<std::byte*>(std::aligned_alloc(4096, nbytes));
    left_nbytes_ -= nbytes;
    segments_.emplace(data, nbytes);
    return data;
  }
  void release(std::byte* segment, std::size_t) noexcept override {
    left_nbytes_ += segments_.at(segment);
    segments_.erase(segment);
    std::free(segment);
  }
  bool waits_at_release() const override { return waits_at_release_; }

 private:
  std::size_t left_nbytes_;
  const bool waits_at_release_;
  std::map<std::byte*, std::size_t> segments_;
};

// Host memory whose system refuses one call in three, by chance.
class RefusingUpstream final : public Upstream {
 public:
  explicit RefusingUpstream(unsigned seed) : random_(seed) {}
  std::size_t granule_nbytes() const override { return inner_->granule_nbytes(); }
  bool can_remap() const override { return true; }
  bool can_stand_at(const std::byte* data, std::size_t nbytes) const override {
    return inner_->can_stand_at(data, nbytes);
  }
  std::byte* allocate(std::size_t nbytes, std::byte* wanted) override {
    if (refuses()) throw Error(ErrorKind::pool_exhausted, "refused by chance");
    return inner_->allocate(nbytes, wanted);
  }
  void release(std::byte* data, std::size_t nbytes) noexcept override { inner_->release(data, nbytes); }
  std::byte* remap(std::span<const Piece> pieces, std::byte* wanted) noexcept override {
    return refuses() ? nullptr : inner_->remap(pieces, wanted);
  }

 private:
  bool refuses() { return random_() % 3 == 0; }

  std::mt19937 random_;
  const std::unique_ptr<Upstream> inner_ = make_host_upstream();
};

inline std::shared_ptr<Pool> make_heap_pool(std::size_t limit_nbytes, std::size_t capacity_nbytes = 4096 * kMiB) {
  return std::make_shared<Pool>(std::make_unique<HeapUpstream>(capacity_nbytes), limit_nbytes);
}

inline std::vector<std::shared_ptr<Pool>> all_pools(std::size_t limit_nbytes) {
  return {make_host_pool(limit_nbytes), std::make_shared<Pool>(make_lazy_upstream(0), limit_nbytes),
          make_heap_pool(limit_nbytes)};
}

inline std::vector<std::shared_ptr<Pool>> remapping_pools(std::size_t limit_nbytes) {
  return {make_host_pool(limit_nbytes), std::make_shared<Pool>(make_lazy_upstream(0), limit_nbytes)};
}

inline std::vector<Block> take(const std::shared_ptr<Pool>& pool, int count, std::size_t nbytes) {
  std::vector<Block> blocks;
  for (int i = 0; i < count; ++i) blocks.push_back(allocate_block(pool, nbytes));
  return blocks;
}

inline void fill(const Block& block, std::uint8_t value) { std::memset(block.data(), value, block.nbytes()); }

// One memcmp with itself, shifted: the sanitizers slow a loop over the bytes down a hundredfold.
inline bool holds(const Block& block, std::uint8_t value) {
  const auto* bytes = static_cast<const std::uint8_t*>(block.data());
  const std::size_t nbytes = block.nbytes();
  return nbytes == 0 || (bytes[0] == value && std::memcmp(bytes, bytes + 1, nbytes - 1) == 0);
}

}  // namespace pipecomm
