// What each part adds to the _core module.
#pragma once

#include <pybind11/pybind11.h>

namespace pipecomm {

void register_build_info(pybind11::module_& module);
void register_codec(pybind11::module_& module);
void register_memory(pybind11::module_& module);
void register_replay(pybind11::module_& module);
void register_schedule(pybind11::module_& module);
void register_transport(pybind11::module_& module);

}  // namespace pipecomm
