// How long a device that a call of this thread has made current stays so.
#pragma once

#include "base/api.h"

namespace pipecomm {

// While one lives, what a call makes current stays current for the calls that follow, so that they need not do it
// again; its end puts back what was. Of the thread that makes it.
class PC_API DeviceScope {
 public:
  DeviceScope();
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  // `leave` is called at the end of the thread's outermost scope; false where it has none.
  static bool keep(void (*leave)());
};

}  // namespace pipecomm
