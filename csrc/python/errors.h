// Turns pipecomm::Error into the Python class of the same kind; used by every Python module.
#pragma once

#include <pybind11/pybind11.h>

#include "base/error.h"

namespace pipecomm {

inline void register_error_translator() {
  pybind11::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const auto errors = pybind11::module_::import("pipecomm.errors");
      pybind11::set_error(errors.attr(error_class_name(error.kind())), error.what());
    }
  });
}

}  // namespace pipecomm
