// Around a fork: locks are taken before and released after it, on both sides, so that the child's state is whole.
#pragma once

#include "base/api.h"

namespace pipecomm {

class PC_API ForkAware {
 public:
  virtual void lock_for_fork() = 0;
  virtual void unlock_after_fork(bool is_child) = 0;

 protected:
  ForkAware() = default;
  ~ForkAware() = default;
  ForkAware(const ForkAware&) = delete;
  ForkAware& operator=(const ForkAware&) = delete;

  // From here on forks call it: at the end of the constructor.
  void hear_of_forks();
  // No more: at the beginning of the destructor.
  void forget_forks();
};

}  // namespace pipecomm
