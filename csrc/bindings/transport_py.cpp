// _core.Listener, _core.Communicator and _core.Transfer.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/dlpack.h"
#include "bindings/kept.h"
#include "python/gil.h"
#include "transport/api/hang_report.h"
#include "transport/api/listener.h"

namespace py = pybind11;

namespace pipecomm {
namespace {

// address, dtype name, shape, order, codec, requires_grad, device; address None = an absent tensor.
using PartTuple =
    std::tuple<std::optional<std::uintptr_t>, std::string, std::vector<std::int64_t>, DimOrder, std::string, bool, int>;
// None: nothing but the host.
using DevicePtr = std::shared_ptr<Device>;

constexpr const char* kCapsuleName = "pipecomm.Communicator";

// More than ten years, infinity and NaN are ten years.
Nanoseconds from_seconds(double seconds) {
  constexpr double kMost = 3.2e8;
  return Nanoseconds(static_cast<std::int64_t>((seconds < kMost ? seconds : kMost) * 1e9));
}

SendPart to_part(const PartTuple& item) {
  const auto& [address, dtype, shape, order, codec, requires_grad, device] = item;
  SendPart part;
  part.absent = !address;
  part.tensor = {reinterpret_cast<void*>(address.value_or(0)), dtype_from_name(dtype), shape, device, order};
  part.codec = parse_codec(codec);
  part.requires_grad = requires_grad;
  return part;
}

// What `stream` does from now on comes after the transfer; what it does before a part is dropped, before its memory is
// used again. Tensors of the host have no stream: the caller waits.
py::list take(Transfer& transfer, const DevicePtr& device, std::uintptr_t stream) {
  void* const native_stream = reinterpret_cast<void*>(stream);
  const bool is_on_host = !device || device->has_host_tensors();
  without_gil([&] {
    give_back_kept();
    is_on_host ? transfer.event().wait() : transfer.event().block(native_stream);
  });
  py::list result;
  for (ReceivedPart& part : transfer.parts()) {
    const int device_index = is_on_host ? kOnHost : part.device;
    py::object bytes = part.block ? to_dlpack(std::move(part.block), device_index, device, native_stream) : py::none();
    result.append(py::make_tuple(bytes, dtype_name(part.dtype), part.shape, part.order, part.is_raw, part.requires_grad,
                                 part.absent));
  }
  transfer.parts().clear();
  return result;
}

// The last one who lets go may have to wait for a device, or for the lock of the transfers.
template <typename Object>
std::shared_ptr<Object> dropped_without_gil(std::shared_ptr<Object> object) {
  Object* const pointer = object.get();
  return {pointer, [owned = std::move(object)](Object*) mutable { without_gil([&] { owned.reset(); }); }};
}

py::capsule to_capsule(const std::shared_ptr<Communicator>& communicator) {
  auto* held = new std::shared_ptr<Communicator>(communicator);
  return py::capsule(held, kCapsuleName, [](void* pointer) {
    without_gil([&] { delete static_cast<std::shared_ptr<Communicator>*>(pointer); });
  });
}

void register_transfer(py::module_& module) {
  py::class_<Transfer, std::shared_ptr<Transfer>>(module, "Transfer")
      .def(
          "wait",
          [](Transfer& transfer, double timeout_s) {
            without_gil([&] { transfer.wait(from_seconds(timeout_s), check_signals); });
            drop_put_aside();
          },
          py::arg("timeout_s"))
      .def("take", &take, py::arg("device").none(true), py::arg("stream"),
           "After wait(): [(bytes over DLPack or None, dtype, shape, order, is_raw, requires_grad, absent)], once.")
      .def_property_readonly("is_done",
                             [](const Transfer& transfer) { return without_gil([&] { return transfer.is_done(); }); })
      .def_property_readonly("peer", &Transfer::peer)
      .def_property_readonly("payload_nbytes", &Transfer::payload_nbytes)
      .def_property_readonly("wire_nbytes", &Transfer::wire_nbytes)
      .def_property_readonly("posted_ns", [](const Transfer& transfer) { return transfer.times().posted_ns; })
      .def_property_readonly("started_ns", [](const Transfer& transfer) { return transfer.times().started_ns; })
      .def_property_readonly("done_ns", [](const Transfer& transfer) { return transfer.times().done_ns; });
}

void register_counters(py::module_& module) {
  py::class_<LinkCounters>(module, "LinkCounters")
      .def_readonly("messages_sent", &LinkCounters::messages_sent)
      .def_readonly("messages_received", &LinkCounters::messages_received)
      .def_readonly("payload_nbytes_sent", &LinkCounters::payload_nbytes_sent)
      .def_readonly("payload_nbytes_received", &LinkCounters::payload_nbytes_received)
      .def_readonly("wire_nbytes_sent", &LinkCounters::wire_nbytes_sent)
      .def_readonly("wire_nbytes_received", &LinkCounters::wire_nbytes_received);
}

std::shared_ptr<Transfer> send(Communicator& self, int peer, const std::vector<PartTuple>& items, std::int32_t tag,
                               const std::string& direction, std::int32_t microbatch, std::uint32_t epoch,
                               std::int32_t stage, const DevicePtr& device, std::uintptr_t stream, py::object kept) {
  drop_put_aside();
  std::vector<SendPart> parts;
  for (const PartTuple& item : items) parts.push_back(to_part(item));
  const MessageKey key{tag, direction_from_name(direction), microbatch, epoch, stage};
  std::shared_ptr<void> owner = keep(std::move(kept));
  return without_gil([&] {
    const Event ready = device ? device->record(reinterpret_cast<void*>(stream)) : Event{};
    return dropped_without_gil(self.send(peer, key, std::move(parts), std::move(owner), ready));
  });
}

std::shared_ptr<Transfer> receive(Communicator& self, int peer, std::int32_t tag, const std::string& direction,
                                  std::int32_t microbatch, std::uint32_t epoch, std::int32_t stage) {
  drop_put_aside();
  const MessageKey key{tag, direction_from_name(direction), microbatch, epoch, stage};
  return without_gil([&] { return dropped_without_gil(self.receive(peer, key, {}, nullptr)); });
}

using CommunicatorClass = py::class_<Communicator, std::shared_ptr<Communicator>>;

void define_transfers(CommunicatorClass& communicator) {
  communicator
      .def("send", &send, py::arg("peer"), py::arg("parts"), py::arg("tag") = 0, py::arg("direction") = "none",
           py::arg("microbatch") = kNoMicrobatch, py::arg("epoch") = 0, py::arg("stage") = kNoStage,
           py::arg("device") = nullptr, py::arg("stream") = 0, py::arg("kept") = py::none(),
           "Posts a message; tensors of the device are read after what the stream does now. Until the tensors have "
           "left, or the peer has let go of them, `kept` lives.")
      .def("receive", &receive, py::arg("peer"), py::arg("tag") = 0, py::arg("direction") = "none",
           py::arg("microbatch") = kNoMicrobatch, py::arg("epoch") = 0, py::arg("stage") = kNoStage,
           "Posts a receive into memory of the pool.");
}

void register_communicator(py::module_& module) {
  CommunicatorClass communicator(module, "Communicator");
  define_transfers(communicator);
  communicator.def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def("use_device", &Communicator::use_device, py::arg("device_index"), py::call_guard<py::gil_scoped_release>())
      .def(
          "begin_epoch",
          [](Communicator& self, std::uint32_t epoch, Iteration iteration) {
            without_gil([&] { self.begin_epoch(epoch, iteration); });
            drop_put_aside();
          },
          py::arg("epoch"), py::arg("iteration") = py::none(), "Texts name the user's iteration where there is one.")
      .def(
          "abort",
          [](Communicator& self, std::uint32_t epoch, const std::string& text) {
            without_gil([&] { self.abort(epoch, text); });
          },
          py::arg("epoch"), py::arg("text"))
      .def("aborted", &Communicator::aborted, py::arg("epoch"))
      .def("set_fail_together", &Communicator::set_fail_together, py::arg("value"))
      .def("check_peers", [](const Communicator& self) { without_gil([&] { self.check_peers(); }); })
      .def("close",
           [](Communicator& self) {
             without_gil([&] { self.close(); });
             drop_put_aside();
           })
      .def(
          "counters", [](Communicator& self, int peer) { return without_gil([&] { return self.counters(peer); }); },
          py::arg("peer"))
      .def("shares_memory", &Communicator::shares_memory, py::arg("peer"))
      .def(
          "path", [](const Communicator& self, int peer) { return without_gil([&] { return self.path(peer); }); },
          py::arg("peer"), "How bytes get there, in words.")
      .def("capsule", &to_capsule);
}

FlowLimits to_limits(std::size_t max_inflight, std::size_t max_inflight_nbytes, bool strict,
                     std::size_t max_process_inflight, std::size_t max_process_inflight_nbytes) {
  FlowLimits limits;
  limits.max_messages = max_inflight;
  if (max_inflight_nbytes > 0) limits.max_nbytes = max_inflight_nbytes;
  limits.max_process_messages = max_process_inflight;
  limits.max_process_nbytes = max_process_inflight_nbytes;
  limits.is_strict = strict;
  return limits;
}

// None where tensors of the host are to count as the host's.
DevicePtr make_stand_in(std::optional<std::int64_t> lag_us) {
  if (!lag_us) return nullptr;
  const std::chrono::microseconds lag(*lag_us);
  return make_host_device([lag] { return make_lagging_stream(lag); });
}

std::shared_ptr<Communicator> connect(Listener& self, int rank, const std::vector<std::string>& addresses,
                                      const std::string& name, double timeout_s, std::shared_ptr<Pool> pool,
                                      double emulated_bytes_per_s, double emulated_latency_s, std::size_t max_inflight,
                                      std::size_t max_inflight_nbytes, bool strict,
                                      std::optional<std::int64_t> stand_in_lag_us, std::size_t max_process_inflight,
                                      std::size_t max_process_inflight_nbytes, const py::object& interrupt) {
  CommunicatorOptions options;
  options.name = name;
  options.pool = std::move(pool);
  options.emulation = {emulated_bytes_per_s, emulated_latency_s};
  options.limits =
      to_limits(max_inflight, max_inflight_nbytes, strict, max_process_inflight, max_process_inflight_nbytes);
  const auto check = [&] {
    check_signals();
    if (interrupt.is_none()) return;
    const py::gil_scoped_acquire gil;
    interrupt();
  };
  return without_gil([&] {
    options.stand_in = make_stand_in(stand_in_lag_us);
    return dropped_without_gil(self.connect(rank, addresses, options, from_seconds(timeout_s), check));
  });
}

void register_listener(py::module_& module) {
  py::class_<Listener>(module, "Listener")
      .def(py::init(&make_listener))
      .def_property_readonly("address", &Listener::address)
      .def("listen_tcp", &Listener::listen_tcp, py::arg("host"), "Ranks on other hosts can call here too.")
      .def("connect", &connect, py::arg("rank"), py::arg("addresses"), py::kw_only(), py::arg("name") = "",
           py::arg("timeout_s") = 300.0, py::arg("pool") = nullptr, py::arg("emulated_bytes_per_s") = 0.0,
           py::arg("emulated_latency_s") = 0.0, py::arg("max_inflight") = 0, py::arg("max_inflight_nbytes") = 0,
           py::arg("strict") = false, py::arg("stand_in_lag_us") = py::none(), py::arg("max_process_inflight") = 0,
           py::arg("max_process_inflight_nbytes") = 0, py::arg("interrupt") = py::none(),
           "Calls `interrupt`, which may raise, every now and then while it waits.");
}

}  // namespace

void register_transport(py::module_& module) {
  py::class_<Device, DevicePtr>(module, "Device").def_property_readonly("name", &Device::name);
  register_transfer(module);
  register_counters(module);
  register_communicator(module);
  register_listener(module);
  module.def(
      "hang_report",
      [](int pid, double timeout_s) {
        return without_gil([&] { return request_hang_report(pid, from_seconds(timeout_s)); });
      },
      py::arg("pid"), py::arg("timeout_s") = 5.0, "What a process of this user waits for, as text.");
  module.def("finish_bridges", [] { without_gil(&finish_bridges); });
  module.def("is_remote", py::overload_cast<const std::string&, const std::string&>(&is_remote), py::arg("own_address"),
             py::arg("peer_address"));
  module.def("describe_errno", &describe_errno, py::arg("code"),
             "Its text, with the limit of the process that is met.");
  module.def("why_unreachable", &why_unreachable, py::arg("own_address"), py::arg("peer_address"));
}

}  // namespace pipecomm
