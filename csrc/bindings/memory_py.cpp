// _core.Pool and _core.Block: pool memory as Python buffers.
#include <utility>

#include "bindings/bindings.h"
#include "memory/pool.h"
#include "python/gil.h"

namespace py = pybind11;

namespace pipecomm {
namespace {

py::dict stats_dict(const Pool& pool) {
  const PoolStats stats = pool.stats();
  py::dict result;
  result["live_nbytes"] = stats.live_nbytes;
  result["pending_nbytes"] = stats.pending_nbytes;
  result["reserved_nbytes"] = stats.reserved_nbytes;
  result["peak_live_nbytes"] = stats.peak_live_nbytes;
  result["peak_reserved_nbytes"] = stats.peak_reserved_nbytes;
  result["free_nbytes"] = stats.free_nbytes;
  result["largest_free_nbytes"] = stats.largest_free_nbytes;
  result["limit_nbytes"] = stats.limit_nbytes;
  result["num_segments"] = stats.num_segments;
  result["num_allocations"] = stats.num_allocations;
  result["num_upstream_calls"] = stats.num_upstream_calls;
  return result;
}

py::buffer_info buffer_of(const Block& block) {
  return py::buffer_info(static_cast<std::uint8_t*>(block.data()), static_cast<py::ssize_t>(block.nbytes()));
}

}  // namespace

void register_memory(py::module_& module) {
  py::class_<Block>(module, "Block", py::buffer_protocol(), "Writable bytes of a pool, until collected.")
      .def_buffer(&buffer_of)
      .def_property_readonly("address",
                             [](const Block& block) { return reinterpret_cast<std::uintptr_t>(block.data()); })
      .def_property_readonly("nbytes", &Block::nbytes);

  py::class_<Pool, std::shared_ptr<Pool>>(module, "Pool")
      .def(
          "allocate",
          [](const std::shared_ptr<Pool>& pool, std::size_t nbytes) {
            return without_gil([&] { return allocate_block(pool, nbytes); });
          },
          py::arg("nbytes"))
      .def("trim", [](Pool& pool) { return without_gil([&] { return pool.trim(); }); })
      .def("check", &Pool::check)
      .def("stats", &stats_dict)
      .def_property("limit_nbytes", &Pool::limit_nbytes, &Pool::set_limit_nbytes);

  module.def("make_host_pool", &make_host_pool, py::arg("limit_nbytes") = 0);
  module.def(
      "make_lazy_pool",
      [](std::size_t capacity_nbytes, std::size_t limit_nbytes) {
        return std::make_shared<Pool>(make_lazy_upstream(capacity_nbytes), limit_nbytes);
      },
      py::arg("capacity_nbytes") = 0, py::arg("limit_nbytes") = 0);
}

}  // namespace pipecomm
