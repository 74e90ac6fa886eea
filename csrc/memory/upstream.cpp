// The upstreams without files: lazy private mappings, and addresses alone.
#include "memory/upstream.h"

#include <sys/mman.h>

#include <cstdint>
#include <string>

#include "base/error.h"
#include "memory/addresses.h"
#include "memory/segment.h"

namespace pipecomm {
namespace {

std::size_t total_nbytes(std::span<const Piece> pieces) {
  std::size_t total = 0;
  for (const Piece& piece : pieces) total += piece.nbytes;
  return total;
}

// Counts what is used of a capacity.
class Budget {
 public:
  explicit Budget(std::size_t capacity_nbytes) : capacity_nbytes_(capacity_nbytes) {}

  void take(std::size_t nbytes) {
    if (capacity_nbytes_ > 0 && nbytes > capacity_nbytes_ - used_nbytes_) {
      throw Error(ErrorKind::pool_exhausted, "expected " + std::to_string(nbytes) + " bytes; got " +
                                                 std::to_string(used_nbytes_) + " bytes used of " +
                                                 std::to_string(capacity_nbytes_));
    }
    used_nbytes_ += nbytes;
  }
  void give_back(std::size_t nbytes) noexcept { used_nbytes_ -= nbytes; }

 private:
  std::size_t capacity_nbytes_;
  std::size_t used_nbytes_ = 0;
};

class LazyUpstream final : public Upstream {
 public:
  explicit LazyUpstream(std::size_t capacity_nbytes) : budget_(capacity_nbytes) {}

  std::size_t granule_nbytes() const override { return page_nbytes(); }
  bool can_remap() const override { return true; }
  bool can_stand_at(const std::byte* data, std::size_t nbytes) const override { return ranges_.has(data, nbytes); }

  std::byte* allocate(std::size_t nbytes, std::byte* wanted) override {
    budget_.take(nbytes);
    std::byte* data = map(nbytes, wanted);
    if (data != nullptr) return data;
    budget_.give_back(nbytes);
    throw Error(ErrorKind::pool_exhausted,
                "expected " + std::to_string(nbytes) + " bytes of address space; got none from the system");
  }

  void release(std::byte* data, std::size_t nbytes) noexcept override {
    budget_.give_back(nbytes);
    ranges_.give_back(data, nbytes);
  }

  std::byte* remap(std::span<const Piece> pieces, std::byte* wanted) noexcept override {
    std::byte* data = map(total_nbytes(pieces), wanted);
    if (data == nullptr) return nullptr;
    for (const Piece& piece : pieces) ranges_.give_back(piece.data, piece.nbytes);
    return data;
  }

 private:
  std::byte* map(std::size_t nbytes, std::byte* wanted) noexcept {
    std::byte* data = ranges_.claim(nbytes, wanted);
    if (data == nullptr || map_private_at(data, nbytes)) return data;
    ranges_.give_back(data, nbytes);
    return nullptr;
  }

  Budget budget_;
  AddressRanges ranges_;
};

class PaperUpstream final : public Upstream {
 public:
  explicit PaperUpstream(std::size_t capacity_nbytes) : budget_(capacity_nbytes) {}

  std::size_t granule_nbytes() const override { return 4096; }
  bool can_remap() const override { return true; }
  // Ranges of their own start kRange apart.
  bool can_stand_at(const std::byte* data, std::size_t nbytes) const override {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    return nbytes <= kRange && (address - 1) / kRange == (address + nbytes - 1) / kRange;
  }

  std::byte* allocate(std::size_t nbytes, std::byte* wanted) override {
    budget_.take(nbytes);
    return place(nbytes, wanted);
  }
  void release(std::byte*, std::size_t nbytes) noexcept override { budget_.give_back(nbytes); }
  std::byte* remap(std::span<const Piece> pieces, std::byte* wanted) noexcept override {
    return place(total_nbytes(pieces), wanted);
  }

 private:
  static constexpr std::uintptr_t kRange = std::uintptr_t{1} << 46;

  std::byte* place(std::size_t nbytes, std::byte* wanted) noexcept {
    if (wanted != nullptr && can_stand_at(wanted, nbytes)) return wanted;
    next_range_ += kRange;
    return reinterpret_cast<std::byte*>(next_range_);
  }

  Budget budget_;
  std::uintptr_t next_range_ = 0;
};

}  // namespace

std::byte* Upstream::remap(std::span<const Piece>, std::byte*) noexcept { return nullptr; }

std::unique_ptr<Upstream> make_lazy_upstream(std::size_t capacity_nbytes) {
  return std::make_unique<LazyUpstream>(capacity_nbytes);
}

std::unique_ptr<Upstream> make_paper_upstream(std::size_t capacity_nbytes) {
  return std::make_unique<PaperUpstream>(capacity_nbytes);
}

}  // namespace pipecomm
