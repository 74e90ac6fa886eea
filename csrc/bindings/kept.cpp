// What is kept for the transport, and where it goes afterwards.
#include "bindings/kept.h"

#include <mutex>
#include <utility>
#include <vector>

namespace pipecomm {
namespace {

struct Aside {
  std::mutex mutex;
  std::vector<PyObject*> objects;  // guarded by mutex
};

// Never destroyed: the comm thread may run until the process ends.
Aside& aside() {
  static Aside& made = *new Aside();
  return made;
}

}  // namespace

std::shared_ptr<void> keep(pybind11::object object) {
  return {object.release().ptr(), [](void* kept) {
            const std::lock_guard lock(aside().mutex);
            aside().objects.push_back(static_cast<PyObject*>(kept));
          }};
}

void drop_put_aside() {
  std::vector<PyObject*> dropped;
  {
    const std::lock_guard lock(aside().mutex);
    dropped.swap(aside().objects);
  }
  for (PyObject* object : dropped) Py_DECREF(object);
}

}  // namespace pipecomm
