// The _core module: a table of contents, no logic.
#include "base/dtype.h"
#include "bindings/bindings.h"
#include "python/errors.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
  module.doc() = "pipecomm's torch-free core; tensors cross as address, byte count, dtype name and stream.";
  pipecomm::register_error_translator();
  module.def(
      "dtype_nbytes", [](const std::string& name) { return dtype_nbytes(pipecomm::dtype_from_name(name)); },
      py::arg("name"));
  module.def("error_class_names", [] {
    std::vector<std::string> names;
    for (int kind = 0; kind < pipecomm::kNumErrorKinds; ++kind) {
      names.emplace_back(pipecomm::error_class_name(static_cast<pipecomm::ErrorKind>(kind)));
    }
    return py::cast(names);
  });
  pipecomm::register_build_info(module);
  pipecomm::register_codec(module);
  pipecomm::register_memory(module);
  pipecomm::register_replay(module);
  pipecomm::register_schedule(module);
  pipecomm::register_transport(module);
}
