// A block that a pool has handed out, and the pools of host memory.
#pragma once

#include <cstddef>
#include <memory>

#include "base/api.h"
#include "memory/pool.h"

namespace pipecomm {

// Goes back when destroyed. Keeps its pool alive.
class PC_API Block {
 public:
  Block() = default;
  // Takes over `node`, which `pool` allocated.
  Block(std::shared_ptr<Pool> pool, BlockNode* node, std::size_t nbytes);
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  void* data() const { return node_ == nullptr ? nullptr : node_->first; }
  // As asked for; the memory may be longer.
  std::size_t nbytes() const { return nbytes_; }
  explicit operator bool() const { return node_ != nullptr; }
  // Gives the block back now, to be handed out again once `event` is ready.
  void reset(const Event& event = {}) noexcept;

 private:
  std::shared_ptr<Pool> pool_;
  BlockNode* node_ = nullptr;
  std::size_t nbytes_ = 0;
};

// A pool over memfd segments of host memory; 0 = no limit.
PC_API std::shared_ptr<Pool> make_host_pool(std::size_t limit_nbytes);
PC_API Block allocate_block(const std::shared_ptr<Pool>& pool, std::size_t nbytes);
// As Pool::try_allocate_node: none for now.
PC_API Block try_allocate_block(const std::shared_ptr<Pool>& pool, std::size_t nbytes, Growth growth = Growth::now);
// As Pool::allocate_node_on.
PC_API Block allocate_block_on(const std::shared_ptr<Pool>& pool, Stream& stream, std::size_t nbytes);

}  // namespace pipecomm
