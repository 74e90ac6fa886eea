// A SIMT stand-in: runs a kernel's own source on the host, each thread of a block as a fiber, so that shuffles and
// barriers wait for the other lanes as they do on a GPU. Blocks run one after another. Not thread-safe.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
// Blocks run one after another, so that one copy serves all.
#define __shared__ static

struct Dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

inline Dim3 threadIdx;
inline Dim3 blockIdx;
inline Dim3 blockDim;
inline Dim3 gridDim;

namespace simt {

inline constexpr std::size_t kStackNbytes = 32 * 1024;
inline constexpr unsigned kWarpSize = 32;

// Stacks are kept between blocks: touching fresh memory would cost more than the kernels.
inline std::byte* stack_of_thread(std::size_t index) {
  static std::vector<std::unique_ptr<std::byte[]>> stacks;
  while (stacks.size() <= index) stacks.push_back(std::make_unique_for_overwrite<std::byte[]>(kStackNbytes));
  return stacks[index].get();
}

// Lanes take turns in ascending or descending order; a result that depends on it lacks a synchronisation.
enum class Order { ascending, descending };

// Shuffles so far that name `mask`, and the values of the last two.
struct Posted {
  unsigned mask;
  std::uint64_t count = 0;
  std::uint32_t value[2] = {};
};

struct Fiber {
  ucontext_t context;
  bool is_done = false;
  // What this lane has posted: barriers so far, and shuffles for each mask.
  std::uint64_t num_barriers = 0;
  std::vector<Posted> posted;
  // Mask of the shuffle this lane waits in; 0 for none.
  unsigned waits_for = 0;

  Posted& posted_for(unsigned mask) {
    for (Posted& shuffles : posted) {
      if (shuffles.mask == mask) return shuffles;
    }
    return posted.emplace_back(Posted{mask});
  }
};

class Block {
 public:
  explicit Block(unsigned num_threads) : fibers_(num_threads) {}

  void run(const std::function<void()>& kernel, Order order) {
    kernel_ = &kernel;
    current() = this;
    for (std::size_t i = 0; i < fibers_.size(); ++i) start(fibers_[i], stack_of_thread(i));
    while (num_done_ < fibers_.size()) {
      progressed_ = false;
      for (std::size_t i = 0; i < fibers_.size(); ++i) resume(order == Order::ascending ? i : fibers_.size() - 1 - i);
      if (!error_.empty()) throw std::runtime_error(error_);
      if (!progressed_) throw std::runtime_error(why_stuck());
    }
  }

  std::uint32_t shuffle_xor(unsigned mask, std::uint32_t value, unsigned offset) {
    Fiber& self = fibers_[running_];
    Posted& posted = self.posted_for(mask);
    const std::uint64_t turn = posted.count++;
    posted.value[turn % 2] = value;
    progressed_ = true;
    const unsigned lane = static_cast<unsigned>(running_) % kWarpSize;
    if ((mask >> lane & 1u) == 0) return fail("a lane shuffles with a mask that leaves it out");
    self.waits_for = mask;
    while (!all_posted(mask, turn)) yield();
    self.waits_for = 0;
    const unsigned source = lane ^ offset;
    if (source >= kWarpSize || (mask >> source & 1u) == 0) return fail("a shuffle reads a lane outside its mask");
    return warp_fiber(source).posted_for(mask).value[turn % 2];
  }

  void barrier() {
    const std::uint64_t turn = fibers_[running_].num_barriers++;
    progressed_ = true;
    const auto is_waiting_for = [turn](const Fiber& fiber) { return !fiber.is_done && fiber.num_barriers <= turn; };
    for (bool waits = true; waits;) {
      waits = false;
      for (const Fiber& fiber : fibers_) waits = waits || is_waiting_for(fiber);
      if (waits) yield();
    }
  }

  static Block*& current() {
    static Block* block = nullptr;
    return block;
  }

 private:
  static void enter() {
    Block& block = *current();
    (*block.kernel_)();
    block.fibers_[block.running_].is_done = true;
    block.progressed_ = true;
    ++block.num_done_;
  }

  void start(Fiber& fiber, std::byte* stack) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = kStackNbytes;
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, &Block::enter, 0);
  }

  void resume(std::size_t index) {
    if (fibers_[index].is_done || !error_.empty()) return;
    running_ = index;
    threadIdx = {static_cast<unsigned>(index), 0, 0};
    swapcontext(&scheduler_, &fibers_[index].context);
  }

  void yield() {
    const std::size_t self = running_;
    swapcontext(&fibers_[self].context, &scheduler_);
  }

  Fiber& warp_fiber(unsigned lane) { return fibers_[running_ / kWarpSize * kWarpSize + lane]; }

  bool all_posted(unsigned mask, std::uint64_t turn) {
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      if ((mask >> lane & 1u) != 0 && warp_fiber(lane).posted_for(mask).count <= turn) return false;
    }
    return true;
  }

  std::string why_stuck() const {
    for (std::size_t i = 0; i < fibers_.size(); ++i) {
      for (std::size_t j = i / kWarpSize * kWarpSize; j < i; ++j) {
        const unsigned mask = fibers_[i].waits_for;
        const unsigned other = fibers_[j].waits_for;
        if (mask != other && (mask & other) != 0) return "lanes of one shuffle name different masks";
      }
    }
    return "deadlock: lanes wait for a shuffle or barrier others never reach";
  }

  // Exceptions do not cross fibers: the scheduler throws once this fiber is left, which is then never resumed.
  std::uint32_t fail(const char* text) {
    error_ = text;
    yield();
    return 0;
  }

  std::vector<Fiber> fibers_;
  const std::function<void()>* kernel_ = nullptr;
  ucontext_t scheduler_;
  std::size_t running_ = 0;
  std::size_t num_done_ = 0;
  bool progressed_ = false;
  std::string error_;
};

// kernel<<<num_blocks, num_threads>>>. Throws std::runtime_error on a deadlock or a shuffle CUDA leaves undefined.
inline void launch(unsigned num_blocks, unsigned num_threads, Order order, const std::function<void()>& kernel) {
  gridDim = {num_blocks, 1, 1};
  blockDim = {num_threads, 1, 1};
  for (unsigned block = 0; block < num_blocks; ++block) {
    blockIdx = {block, 0, 0};
    Block(num_threads).run(kernel, order);
  }
}

}  // namespace simt

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
  static_assert(sizeof(T) == sizeof(std::uint32_t));
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = simt::Block::current()->shuffle_xor(mask, bits, static_cast<unsigned>(offset));
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

inline void __syncthreads() { simt::Block::current()->barrier(); }
