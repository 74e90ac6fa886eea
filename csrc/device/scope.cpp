// The scopes of each thread.
#include "device/scope.h"

#include <utility>

namespace pipecomm {
namespace {

struct Scopes {
  int num_open = 0;
  void (*leave)() = nullptr;
};

thread_local Scopes t_scopes;

}  // namespace

DeviceScope::DeviceScope() { ++t_scopes.num_open; }

DeviceScope::~DeviceScope() {
  if (--t_scopes.num_open > 0) return;
  if (void (*leave)() = std::exchange(t_scopes.leave, nullptr)) leave();
}

bool DeviceScope::keep(void (*leave)()) {
  if (t_scopes.num_open == 0) return false;
  t_scopes.leave = leave;
  return true;
}

}  // namespace pipecomm
