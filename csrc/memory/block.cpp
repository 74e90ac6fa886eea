// Ownership of a block.
#include "memory/block.h"

#include <utility>

namespace pipecomm {

Block::Block(std::shared_ptr<Pool> pool, BlockNode* node, std::size_t nbytes)
    : pool_(std::move(pool)), node_(node), nbytes_(nbytes) {}

Block::Block(Block&& other) noexcept
    : pool_(std::move(other.pool_)),
      node_(std::exchange(other.node_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)) {}

Block& Block::operator=(Block&& other) noexcept {
  if (this != &other) {
    reset();
    pool_ = std::move(other.pool_);
    node_ = std::exchange(other.node_, nullptr);
    nbytes_ = std::exchange(other.nbytes_, 0);
  }
  return *this;
}

Block::~Block() { reset(); }

void Block::reset(const Event& event) noexcept {
  if (node_ != nullptr) pool_->deallocate_node(std::exchange(node_, nullptr), event);
  pool_.reset();
  nbytes_ = 0;
}

std::shared_ptr<Pool> make_host_pool(std::size_t limit_nbytes) {
  return std::make_shared<Pool>(make_host_upstream(), limit_nbytes);
}

Block allocate_block(const std::shared_ptr<Pool>& pool, std::size_t nbytes) {
  return Block(pool, pool->allocate_node(nbytes), nbytes);
}

Block try_allocate_block(const std::shared_ptr<Pool>& pool, std::size_t nbytes, Growth growth) {
  BlockNode* node = pool->try_allocate_node(nbytes, growth);
  return node == nullptr ? Block() : Block(pool, node, nbytes);
}

Block allocate_block_on(const std::shared_ptr<Pool>& pool, Stream& stream, std::size_t nbytes) {
  return Block(pool, pool->allocate_node_on(stream, nbytes), nbytes);
}

}  // namespace pipecomm
