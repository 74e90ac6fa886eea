// pthread_atfork over a list of pools; the directory of segments comes last, as its lock does everywhere.
#include "memory/fork.h"

#include <pthread.h>

#include <mutex>
#include <vector>

#include "memory/segment_directory.h"

namespace pipecomm {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<ForkAware*> members;  // guarded by mutex
};

// Never destroyed: pools may live until the process ends.
Registry& registry() {
  static auto* const kRegistry = new Registry();
  return *kRegistry;
}

void prepare() {
  registry().mutex.lock();
  for (ForkAware* member : registry().members) member->lock_for_fork();
  SegmentDirectory::instance().lock_for_fork();
}

void leave(bool is_child) {
  SegmentDirectory::instance().unlock_after_fork(is_child);
  for (ForkAware* member : registry().members) member->unlock_after_fork(is_child);
  registry().mutex.unlock();
}

}  // namespace

void ForkAware::hear_of_forks() {
  static const int kHooked = pthread_atfork(prepare, [] { leave(false); }, [] { leave(true); });
  static_cast<void>(kHooked);
  const std::scoped_lock lock(registry().mutex);
  registry().members.push_back(this);
}

void ForkAware::forget_forks() {
  const std::scoped_lock lock(registry().mutex);
  std::erase(registry().members, this);
}

}  // namespace pipecomm
