// The interpreter lock: give it up while waiting, take it to look for Ctrl-C.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <memory>
#include <optional>

namespace pipecomm {

// Releases the interpreter lock for its scope if this thread holds it. Needed before joining a thread or taking a
// mutex: whoever holds that may itself be waiting for the interpreter lock.
class InterpreterLockReleased {
 public:
  InterpreterLockReleased() {
    if (Py_IsInitialized() && PyGILState_Check()) release_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> release_;
};

// Runs Python's signal handlers; throws what they raise (KeyboardInterrupt). They run in the main thread only, and a
// daemon thread that asked for the lock while the interpreter ends would bring the process down.
inline void check_signals() {
  const bool is_main_thread = gettid() == getpid();
  if (!is_main_thread || !Py_IsInitialized()) return;
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A Python object that any thread may drop.
inline std::shared_ptr<py::object> share_object(py::object object) {
  return {new py::object(std::move(object)), [](py::object* owned) {
            if (!Py_IsInitialized()) return;
            const py::gil_scoped_acquire acquire;
            delete owned;
          }};
}

}  // namespace pipecomm
