// Python objects that the transport keeps until it has done with their memory.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace pipecomm {

// An owner that any thread may drop. The object is then put aside: dropping it takes the interpreter lock, and a thread
// of the transport that waits for that while the interpreter ends would take the process with it.
std::shared_ptr<void> keep(pybind11::object object);
// Drops what has been put aside, with the interpreter lock.
void drop_put_aside();

}  // namespace pipecomm
