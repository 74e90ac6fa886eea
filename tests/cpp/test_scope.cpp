// What a call of a thread makes current is put back at the end of the thread's outermost scope, and once.
#include <thread>

#include "check.h"
#include "device/scope.h"

using namespace pipecomm;

namespace {

int g_num_left = 0;

bool keep() {
  return DeviceScope::keep([] { ++g_num_left; });
}

}  // namespace

TEST(nothing_is_kept_without_a_scope) {
  g_num_left = 0;
  CHECK(!keep());
  CHECK_EQ(g_num_left, 0);
}

TEST(outermost_scope_puts_back_what_was_kept_once) {
  g_num_left = 0;
  {
    const DeviceScope outer;
    {
      const DeviceScope inner;
      CHECK(keep());
    }
    CHECK_EQ(g_num_left, 0);
    CHECK(keep());
  }
  CHECK_EQ(g_num_left, 1);
  {
    const DeviceScope empty;
  }
  CHECK_EQ(g_num_left, 1);
}

TEST(scope_is_that_of_its_thread) {
  const DeviceScope scope;
  bool is_kept = true;
  std::thread([&] { is_kept = keep(); }).join();
  CHECK(!is_kept);
}

CHECK_MAIN()
