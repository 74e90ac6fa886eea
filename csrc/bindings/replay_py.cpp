// _core.ReplayTrace: traces against allocators' policies.
#include "bindings/bindings.h"
#include "python/gil.h"
#include "replay/policy.h"
#include "replay/replay.h"

namespace py = pybind11;

namespace pipecomm {
namespace {

std::span<const std::int64_t> numbers(const py::buffer_info& info) {
  return {static_cast<const std::int64_t*>(info.ptr), static_cast<std::size_t>(info.size)};
}

// From buffers of int64 that lie in order.
ReplayTrace make_trace(const py::buffer& ids, const py::buffer& nbytes, const py::buffer& streams) {
  const py::buffer_info buffers[] = {ids.request(), nbytes.request(), streams.request()};
  for (const py::buffer_info& info : buffers) {
    if (!info.item_type_is_equivalent_to<std::int64_t>() || info.ndim != 1 || info.strides[0] != 8) {
      throw Error(ErrorKind::config, "expected a contiguous buffer of int64; got format " + info.format);
    }
  }
  return without_gil([&] { return prepare_replay(numbers(buffers[0]), numbers(buffers[1]), numbers(buffers[2])); });
}

py::dict replay_dict(const ReplayTrace& trace, const std::string& policy, std::size_t capacity_nbytes,
                     std::size_t num_samples) {
  const ReplayResult replayed = without_gil([&] { return replay(trace, policy, capacity_nbytes, num_samples); });
  py::dict result;
  result["peak_reserved_nbytes"] = replayed.peak_reserved_nbytes;
  result["num_upstream_calls"] = replayed.num_upstream_calls;
  result["failed_at"] = replayed.failed_at < 0 ? py::object(py::none()) : py::int_(replayed.failed_at);
  result["live_nbytes"] = py::cast(replayed.live_nbytes);
  result["reserved_nbytes"] = py::cast(replayed.reserved_nbytes);
  return result;
}

}  // namespace

void register_replay(py::module_& module) {
  py::class_<ReplayTrace>(module, "ReplayTrace")
      .def(py::init(&make_trace), py::arg("ids"), py::arg("nbytes"), py::arg("streams"))
      .def_property_readonly("num_events", [](const ReplayTrace& trace) { return trace.events.size(); })
      .def_readonly("peak_live_nbytes", &ReplayTrace::peak_live_nbytes)
      .def("replay", &replay_dict, py::arg("policy"), py::arg("capacity_nbytes") = 0, py::arg("num_samples") = 0);
  module.def("replay_policies", &policy_names);
}

}  // namespace pipecomm
