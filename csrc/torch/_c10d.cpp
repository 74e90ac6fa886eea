// The module _c10d: makes backends for pipecomm/backend.py. The only translation unit with torch headers.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "python/errors.h"
#include "torch/backend.h"
#include "torch/pool_allocator.h"
#include "torch/pool_tensors.h"

namespace pipecomm {
namespace {

// Communicators that may still be open, for close_all at exit.
std::mutex open_mutex;
std::vector<std::weak_ptr<Communicator>> open_communicators;  // guarded by open_mutex

void remember(const std::shared_ptr<Communicator>& communicator) {
  const std::lock_guard<std::mutex> lock(open_mutex);
  std::erase_if(open_communicators, [](const auto& one) { return one.expired(); });
  open_communicators.push_back(communicator);
}

// For the end of the process: no comm thread may still run while the interpreter or libtorch is destroyed.
void close_all() {
  const std::lock_guard<std::mutex> lock(open_mutex);
  for (const auto& one : open_communicators) {
    if (const auto communicator = one.lock()) communicator->close();
  }
  open_communicators.clear();
}

// _core may be built with another pybind11 than torch, so the pointer crosses in a capsule.
std::shared_ptr<Communicator> unpack_communicator(const py::object& capsule) {
  if (capsule.is_none()) return nullptr;
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), "pipecomm.Communicator");
  if (pointer == nullptr) throw py::error_already_set();
  const auto communicator = *static_cast<std::shared_ptr<Communicator>*>(pointer);
  remember(communicator);
  return communicator;
}

// What a thread used before.
struct PoolUse {
  std::shared_ptr<c10::SafePyObject> before;

  void end() { PoolScope::exchange(std::exchange(before, nullptr)); }
};

// A pool, for torch.
class TorchPool {
 public:
  explicit TorchPool(const py::object& capsule) {
    void* pointer = PyCapsule_GetPointer(capsule.ptr(), "pipecomm.Pool");
    if (pointer == nullptr) throw py::error_already_set();
    pool_ = *static_cast<std::shared_ptr<Pool>*>(pointer);
  }

  py::object empty(at::IntArrayRef sizes, at::ScalarType dtype) const {
    const auto tensor = without_gil([&] { return try_empty(pool_, sizes, dtype); });
    return tensor ? py::cast(*tensor) : py::none();
  }

  // The calling thread uses it from here on.
  PoolUse begin_use() const {
    PoolAllocator::install();
    return {PoolScope::exchange(std::make_shared<PoolInUse>(pool_))};
  }

 private:
  std::shared_ptr<Pool> pool_;
};

// `inner_names` are the backends for the collectives, by device type; `make_inner(name, timeout)` gives one, and is
// called at the first collective that needs it.
c10::intrusive_ptr<PipecommBackend> make_backend(int rank, int size, const py::object& communicator,
                                                 const InnerNames& inner_names, py::object make_inner,
                                                 std::chrono::milliseconds timeout, const std::string& codec,
                                                 const std::string& grad_codec, std::size_t min_nbytes) {
  const auto group_timeout = std::make_shared<GroupTimeout>(timeout.count());
  InnerFactory call_make_inner = [group_timeout, shared = share_object(std::move(make_inner))](
                                     const std::string& name, std::chrono::milliseconds own_timeout) {
    const py::gil_scoped_acquire acquire;
    const std::chrono::milliseconds groups(group_timeout->load());
    const bool is_shorter = own_timeout.count() > 0 && own_timeout < groups;
    const auto made = (*shared)(name, is_shorter ? own_timeout : groups).cast<InnerPtr>();
    if (is_shorter) made->setTimeout(groups);  // that of later calls
    return made;
  };
  const CodecRule rule{parse_codec(codec), parse_codec(grad_codec), min_nbytes};
  return c10::make_intrusive<PipecommBackend>(rank, size, unpack_communicator(communicator), inner_names,
                                              std::move(call_make_inner), group_timeout, rule);
}

}  // namespace
}  // namespace pipecomm

PYBIND11_MODULE(_c10d, module) {
  using pipecomm::PipecommBackend;
  // Registers the base class with pybind11.
  py::module_::import("torch.distributed");
  pipecomm::register_error_translator();
  py::class_<PipecommBackend, c10d::Backend, c10::intrusive_ptr<PipecommBackend>>(module, "PipecommBackend")
      .def(py::init(&pipecomm::make_backend), py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("communicator"),
           py::arg("inner_names"), py::arg("make_inner"), py::arg("timeout"), py::arg("codec"), py::arg("grad_codec"),
           py::arg("min_nbytes"))
      .def_property_readonly("timeout", &PipecommBackend::timeout);
  py::class_<pipecomm::PoolUse>(module, "PoolUse").def("end", &pipecomm::PoolUse::end);
  py::class_<pipecomm::TorchPool>(module, "TorchPool")
      .def(py::init<const py::object&>(), py::arg("capsule"))
      .def("empty", &pipecomm::TorchPool::empty)
      .def("begin_use", &pipecomm::TorchPool::begin_use);
  module.def("close_all", [] { pipecomm::without_gil(&pipecomm::close_all); });
}
