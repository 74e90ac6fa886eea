// Python's lock (the GIL): given up while C++ waits, taken to look for Ctrl-C. For both modules.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace pipecomm {

// Calls `fn` without the GIL, whether or not this thread holds it. Needed before joining a thread or taking a mutex:
// whoever holds that may itself be waiting for the GIL.
// Unlike pybind11::gil_scoped_release, takes the GIL back outside a destructor: at interpreter exit Python ends a
// daemon thread there by unwinding its stack, which would terminate the process if it had to leave a destructor.
template <typename Fn>
auto without_gil(Fn&& fn) {
  if (!Py_IsInitialized() || !PyGILState_Check()) return fn();
  PyThreadState* thread = PyEval_SaveThread();
  try {
    if constexpr (std::is_void_v<decltype(fn())>) {
      fn();
      PyEval_RestoreThread(thread);
    } else {
      auto result = fn();
      PyEval_RestoreThread(thread);
      return result;
    }
  } catch (const std::exception&) {
    PyEval_RestoreThread(thread);
    throw;
  }
}

// Runs Python's signal handlers; throws what they raise (KeyboardInterrupt). They run in the main thread only, and a
// daemon thread that asked for the GIL while the interpreter ends would bring the process down.
inline void check_signals() {
  const bool is_main_thread = gettid() == getpid();
  if (!is_main_thread || !Py_IsInitialized()) return;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// A Python object that any thread may drop.
inline std::shared_ptr<pybind11::object> share_object(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* owned) {
            if (!Py_IsInitialized()) return;
            const pybind11::gil_scoped_acquire acquire;
            delete owned;
          }};
}

}  // namespace pipecomm
