// _core.Pool and _core.Block: pool memory as Python buffers.
#include <utility>

#include "bindings/bindings.h"
#include "memory/block.h"
#include "memory/device_memory.h"
#include "memory/trace.h"
#include "python/gil.h"

namespace py = pybind11;

namespace pipecomm {
namespace {

py::dict stats_dict(Pool& pool) {
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
  result["num_remaps"] = stats.num_remaps;
  return result;
}

const char* state_name(BlockState state) {
  switch (state) {
    case BlockState::live:
      return "live";
    case BlockState::pending:
      return "pending";
    default:
      return "free";  // cached ones too: the next request may have them
  }
}

// (is segment, address, bytes, bytes asked for, "small" or "large", state, tag)
py::list snapshot_list(Pool& pool) {
  py::list result;
  for (const SnapshotEntry& entry : without_gil([&] { return pool.snapshot(); })) {
    const char* segment_class = entry.segment_class == SegmentClass::small ? "small" : "large";
    result.append(py::make_tuple(entry.is_segment, reinterpret_cast<std::uintptr_t>(entry.data), entry.nbytes,
                                 entry.requested_nbytes, segment_class, state_name(entry.state), entry.tag));
  }
  return result;
}

py::tuple tag_tuple(const Pool& pool, std::uint16_t tag) {
  const TagStats stats = pool.tag_stats(tag);
  return py::make_tuple(stats.live_nbytes, stats.peak_live_nbytes, stats.num_allocations);
}

// `callback(nbytes)` is called, and dropped, by whichever thread; None: no callback.
void set_exhausted(Pool& pool, const py::object& callback) {
  Pool::Exhausted exhausted;
  if (!callback.is_none()) {
    const std::shared_ptr<py::object> shared(new py::object(callback), [](py::object* owned) {
      if (!Py_IsInitialized()) return;
      const py::gil_scoped_acquire acquire;
      delete owned;
    });
    exhausted = [shared](std::size_t nbytes) {
      const py::gil_scoped_acquire acquire;
      return (*shared)(nbytes).cast<bool>();
    };
  }
  const py::gil_scoped_release release;
  pool.set_exhausted(std::move(exhausted));
}

// `callback()` is called by whichever thread when a device has no memory left.
void set_ask(const py::object& callback) {
  const std::shared_ptr<py::object> shared = share_object(callback);
  const auto ask = [shared] {
    if (!Py_IsInitialized()) return false;
    const py::gil_scoped_acquire gil;
    try {
      (*shared)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("pipecomm's call for memory");
      return false;
    }
    return true;
  };
  without_gil([&] { set_memory_ask(ask); });
}

// The events noted so far, as int64 pairs (address, bytes or -1 for a free).
py::bytes take_events(TraceRecorder& recorder) {
  const std::vector<TraceEvent> events = recorder.take();
  return py::bytes(reinterpret_cast<const char*>(events.data()), events.size() * sizeof(TraceEvent));
}

// For the torch half, which may be built with another pybind11.
py::capsule to_capsule(const std::shared_ptr<Pool>& pool) {
  return py::capsule(new std::shared_ptr<Pool>(pool), "pipecomm.Pool",
                     [](void* pointer) { delete static_cast<std::shared_ptr<Pool>*>(pointer); });
}

// What a benchmark times: nothing of Python in between.
void churn(Pool& pool, std::size_t nbytes, std::size_t count) {
  for (; count > 0; --count) pool.deallocate_node(pool.allocate_node(nbytes));
}

py::buffer_info buffer_of(const Block& block) {
  return py::buffer_info(static_cast<std::uint8_t*>(block.data()), static_cast<py::ssize_t>(block.nbytes()));
}

void register_functions(py::module_& module) {
  module.def("set_memory_ask", &set_ask, py::arg("callback"),
             "Called by any thread when a device has no memory left: what others keep of it is to be given back.");
  module.def("set_thread_tag", &Pool::set_thread_tag, py::arg("tag"));
  module.def("num_tags", [] { return Pool::kNumTags; });
  module.def("make_host_pool", &make_host_pool, py::arg("limit_nbytes") = 0);
  module.def(
      "make_lazy_pool",
      [](std::size_t capacity_nbytes, std::size_t limit_nbytes) {
        return std::make_shared<Pool>(make_lazy_upstream(capacity_nbytes), limit_nbytes);
      },
      py::arg("capacity_nbytes") = 0, py::arg("limit_nbytes") = 0);
}

}  // namespace

void register_memory(py::module_& module) {
  py::class_<Block>(module, "Block", py::buffer_protocol(), "Writable bytes of a pool, until collected.")
      .def_buffer(&buffer_of)
      .def_property_readonly("address",
                             [](const Block& block) { return reinterpret_cast<std::uintptr_t>(block.data()); })
      .def_property_readonly("nbytes", &Block::nbytes);

  py::class_<TraceRecorder, std::shared_ptr<TraceRecorder>>(module, "TraceRecorder")
      .def(py::init<>())
      .def("take", &take_events);

  py::class_<Pool, std::shared_ptr<Pool>>(module, "Pool")
      .def(
          "allocate",
          [](const std::shared_ptr<Pool>& pool, std::size_t nbytes) {
            return without_gil([&] { return allocate_block(pool, nbytes); });
          },
          py::arg("nbytes"))
      .def("trim", [](Pool& pool) { return without_gil([&] { return pool.trim(); }); })
      .def("check", &Pool::check, py::call_guard<py::gil_scoped_release>())
      .def("stats", &stats_dict)
      .def("reset_peaks", &Pool::reset_peaks, py::call_guard<py::gil_scoped_release>())
      .def("snapshot", &snapshot_list)
      .def("tag_stats", &tag_tuple, py::arg("tag"))
      .def("set_exhausted", &set_exhausted, py::arg("callback"))
      .def("set_recorder", &Pool::set_recorder, py::arg("recorder"))
      .def("capsule", &to_capsule)
      .def("churn", &churn, py::arg("nbytes"), py::arg("count"), py::call_guard<py::gil_scoped_release>())
      .def_property("limit_nbytes", &Pool::limit_nbytes, &Pool::set_limit_nbytes);

  register_functions(module);
}

}  // namespace pipecomm
