// What a trace is replayed against: an allocator's policy, over addresses with nothing behind them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/api.h"

namespace pipecomm {

// Slots are the blocks of a trace, numbered from 0.
class PC_API Policy {
 public:
  virtual ~Policy() = default;

  // False where the capacity does not allow it.
  virtual bool allocate(std::size_t slot, std::size_t nbytes, std::int64_t stream) = 0;
  // What is reserved stays.
  virtual void free(std::size_t slot) = 0;
  virtual std::size_t reserved_nbytes() const = 0;
  // How often memory was asked for, given back or moved.
  virtual std::uint64_t num_upstream_calls() const = 0;
};

// "pipecomm", "torch", "torch:expandable" or "size-classes"; `capacity_nbytes` is what the system has (0: enough).
// Throws a config error for another name.
PC_API std::unique_ptr<Policy> make_policy(const std::string& name, std::size_t num_slots, std::size_t capacity_nbytes);
PC_API std::vector<std::string> policy_names();

std::unique_ptr<Policy> make_pool_policy(std::size_t num_slots, std::size_t capacity_nbytes);
std::unique_ptr<Policy> make_torch_policy(std::size_t num_slots, std::size_t capacity_nbytes, bool is_expandable);
std::unique_ptr<Policy> make_size_class_policy(std::size_t num_slots, std::size_t capacity_nbytes);

}  // namespace pipecomm
