// Runs C++ without the GIL in a way that survives interpreter exit.
#pragma once

#include <pybind11/pybind11.h>

namespace pipecomm {

// Unlike pybind11::gil_scoped_release, takes the GIL back outside a destructor: at interpreter exit Python ends a
// daemon thread there by unwinding its stack, which would terminate the process if it had to leave a destructor.
template <typename Fn>
auto without_gil(Fn&& fn) {
  PyThreadState* thread = PyEval_SaveThread();
  try {
    auto result = fn();
    PyEval_RestoreThread(thread);
    return result;
  } catch (const std::exception&) {
    PyEval_RestoreThread(thread);
    throw;
  }
}

}  // namespace pipecomm
