// torch's CPU allocator with pools in front: large requests of threads that use one come from it.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/SafePyObject.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "memory/block.h"
#include "memory/fork.h"

namespace pipecomm {

// What a thread uses. Not a Python object; it travels as one because torch passes those of a thread on to the threads
// that run a backward, or a fork, that is started there.
struct PoolInUse final : c10::SafePyObject {
  explicit PoolInUse(std::shared_ptr<Pool> used) : SafePyObject(nullptr, nullptr), pool(std::move(used)) {}

  const std::shared_ptr<Pool> pool;  // nullptr: torch's own allocator
};

// Of the calling thread.
class PoolScope {
 public:
  static const PoolInUse* current() {
    if (!at::impl::ThreadLocalPythonObjects::contains(key())) return nullptr;
    return static_cast<const PoolInUse*>(at::impl::ThreadLocalPythonObjects::get(key()).get());
  }
  // Gives what was used before.
  static std::shared_ptr<c10::SafePyObject> exchange(std::shared_ptr<c10::SafePyObject> used) {
    std::shared_ptr<c10::SafePyObject> before;
    if (at::impl::ThreadLocalPythonObjects::contains(key())) before = at::impl::ThreadLocalPythonObjects::get(key());
    if (used == nullptr) {
      at::impl::ThreadLocalPythonObjects::erase(key());
    } else {
      at::impl::ThreadLocalPythonObjects::set(key(), std::move(used));
    }
    return before;
  }

 private:
  static const std::string& key() {
    static const std::string& made = *new std::string("pipecomm.pool");
    return made;
  }
};

// Blocks by their address: torch frees with nothing else, as oneDNN's allocator shows.
class LentBlocks final : private ForkAware {
 public:
  LentBlocks() { hear_of_forks(); }

  void* put(Block block) {
    void* data = block.data();
    const std::scoped_lock lock(mutex_);
    blocks_.emplace(data, std::move(block));
    return data;
  }
  // No block for memory that is not a pool's.
  Block take(void* data) {
    const std::scoped_lock lock(mutex_);
    const auto node = blocks_.extract(data);
    return node ? std::move(node.mapped()) : Block();
  }

 private:
  void lock_for_fork() override { mutex_.lock(); }
  void unlock_after_fork(bool) override { mutex_.unlock(); }

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;  // guarded by mutex_
};

class PoolAllocator final : public c10::Allocator {
 public:
  static constexpr std::size_t kMinNbytes = std::size_t{64} << 10;

  // Puts itself before torch's CPU allocator, once, for good: storages keep its address.
  static void install() {
    static std::once_flag once;
    std::call_once(once, [] {
      instance() = new PoolAllocator(*c10::GetCPUAllocator());
      // torch's own have priority 0; equal priority replaces.
      c10::SetCPUAllocator(instance(), 1);
    });
  }

  at::DataPtr allocate(std::size_t nbytes) override {
    const PoolInUse* used = nbytes >= kMinNbytes ? PoolScope::current() : nullptr;
    if (used == nullptr || used->pool == nullptr) return before_.allocate(nbytes);
    void* data = take(used->pool, nbytes);
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return {data, data, &give_back, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { default_copy_data(to, from, nbytes); }

 private:
  explicit PoolAllocator(c10::Allocator& before) : before_(before) {}

  static PoolAllocator*& instance() {
    static PoolAllocator* made = nullptr;
    return made;
  }

  void* take(const std::shared_ptr<Pool>& pool, std::size_t nbytes) {
    try {
      return lent_.put(allocate_block(pool, nbytes));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::pool_exhausted) throw;
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }

  // Also what a raw allocation gave, which may be of the allocator before.
  static void give_back(void* data) {
    if (data == nullptr) return;
    PoolAllocator& own = *instance();
    Block block = own.lent_.take(data);
    if (!block) return own.before_.raw_deallocate(data);
    c10::profiledCPUMemoryReporter().Delete(data);
  }

  c10::Allocator& before_;
  LentBlocks lent_;
};

}  // namespace pipecomm
