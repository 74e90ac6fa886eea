// Schedule functions of _core: lists of actions come and go as NumPy arrays.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "python/gil.h"
#include "schedule/check.h"
#include "schedule/lowering.h"
#include "schedule/walk.h"

namespace py = pybind11;

namespace pipecomm {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename To, typename From>
std::span<const To> as(const Array<From>& array) {
  return {reinterpret_cast<const To*>(array.data()),
          static_cast<std::size_t>(array.size()) * sizeof(From) / sizeof(To)};
}

// The arrays that the lists read from; their Python owners keep them while a call lasts.
struct PyLists {
  Array<std::int32_t> actions;
  Array<std::int64_t> offsets;
  // (kinds, 4): the fields of KindTraits.
  Array<std::int32_t> kinds;
  // (directions, 2): the kinds that send and receive.
  Array<std::int32_t> messages;
  // (1 + 2 * directions, stages): rank_of, sources by direction, targets by direction.
  Array<std::int32_t> ways;

  schedule::Lists get() const {
    schedule::Lists lists;
    lists.rows = {as<schedule::Action>(actions), as<std::int64_t>(offsets)};
    lists.kinds = as<schedule::KindTraits>(kinds);
    const std::span<const std::int32_t> all = as<std::int32_t>(ways);
    const std::size_t num_stages = all.size() / (1 + 2 * schedule::kNumDirections);
    lists.ways.rank_of = all.subspan(0, num_stages);
    for (std::size_t direction = 0; direction < schedule::kNumDirections; ++direction) {
      lists.ways.source[direction] = all.subspan((1 + direction) * num_stages, num_stages);
      lists.ways.target[direction] = all.subspan((1 + schedule::kNumDirections + direction) * num_stages, num_stages);
      lists.sends[direction] = messages.data()[2 * direction];
      lists.receives[direction] = messages.data()[2 * direction + 1];
    }
    return lists;
  }
};

// The vector's memory as an array that owns it.
template <typename To, typename From>
py::array_t<To> give(std::vector<From>&& values, std::vector<py::ssize_t> shape) {
  auto* owned = new std::vector<From>(std::move(values));
  py::capsule owner(owned, [](void* memory) { delete static_cast<std::vector<From>*>(memory); });
  return py::array_t<To>(std::move(shape), reinterpret_cast<const To*>(owned->data()), owner);
}

template <typename T>
py::array_t<T> give(std::vector<T>&& values) {
  const auto size = static_cast<py::ssize_t>(values.size());
  return give<T, T>(std::move(values), {size});
}

py::array_t<std::int32_t> give_actions(std::vector<schedule::Action>&& actions) {
  const auto size = static_cast<py::ssize_t>(actions.size());
  return give<std::int32_t>(std::move(actions), {size, 3});
}

py::object find_fault(const PyLists& given, std::int32_t num_stages, std::int32_t num_microbatches) {
  const schedule::Lists lists = given.get();
  const auto fault = without_gil([&] { return schedule::find_fault(lists, num_stages, num_microbatches); });
  if (!fault) return py::none();
  return py::make_tuple(static_cast<std::int32_t>(fault->rule), fault->index, fault->other);
}

py::object find_misorder(const PyLists& given) {
  const schedule::Lists lists = given.get();
  const auto found = without_gil([&] { return schedule::find_misorder(lists); });
  if (!found) return py::none();
  return py::make_tuple(found->index, found->sent_index, found->num_used);
}

py::tuple lower(const PyLists& given) {
  const schedule::Lists lists = given.get();
  schedule::Lowered lowered = without_gil([&] { return schedule::lower(lists); });
  return py::make_tuple(give_actions(std::move(lowered.actions)), give(std::move(lowered.offsets)));
}

py::dict walk(const PyLists& given, const Array<double>& compute_s, const Array<double>& transfer_s,
              const Array<double>& latency_s, std::int64_t slots, std::int64_t max_in_flight, bool sends_block,
              const std::function<void(double)>& progress) {
  const schedule::Lists lists = given.get();
  const std::size_t num_stages = lists.ways.rank_of.size();
  schedule::Timing timing;
  timing.compute_s = as<double>(compute_s);
  for (std::size_t direction = 0; direction < schedule::kNumDirections; ++direction) {
    timing.transfer_s[direction] = as<double>(transfer_s).subspan(direction * num_stages, num_stages);
    timing.latency_s[direction] = as<double>(latency_s).subspan(direction * num_stages, num_stages);
  }
  timing.slots = slots;
  timing.max_in_flight = max_in_flight;
  timing.sends_block = sends_block;
  schedule::Progress report;
  if (progress) {
    report = [&progress](double share) {
      const py::gil_scoped_acquire gil;
      progress(share);
    };
  }
  schedule::Walk walked = without_gil([&] { return schedule::walk(lists, timing, report); });
  py::dict result;
  result["stuck_at"] = give(std::move(walked.stuck_at));
  result["clock_s"] = give(std::move(walked.clock_s));
  result["busy_s"] = give(std::move(walked.busy_s));
  result["exposed_comm_s"] = give(std::move(walked.exposed_comm_s));
  result["start_s"] = give(std::move(walked.start_s));
  result["sends"] = give_actions(std::move(walked.sends));
  result["senders"] = give(std::move(walked.senders));
  result["message_start_s"] = give(std::move(walked.message_start_s));
  result["message_end_s"] = give(std::move(walked.message_end_s));
  return result;
}

}  // namespace

void register_schedule(py::module_& module) {
  using Numbers = Array<std::int32_t>;
  py::class_<PyLists>(module, "ScheduleLists")
      .def(py::init([](Numbers actions, Array<std::int64_t> offsets, Numbers kinds, Numbers messages, Numbers ways) {
             return PyLists{std::move(actions), std::move(offsets), std::move(kinds), std::move(messages),
                            std::move(ways)};
           }),
           py::arg("actions"), py::arg("offsets"), py::arg("kinds"), py::arg("messages"), py::arg("ways"))
      .def("find_fault", &find_fault, py::arg("num_stages"), py::arg("num_microbatches"))
      .def("find_misorder", &find_misorder)
      .def("lower", &lower)
      .def("walk", &walk, py::arg("compute_s"), py::arg("transfer_s"), py::arg("latency_s"), py::arg("slots"),
           py::arg("max_in_flight"), py::arg("sends_block"), py::arg("progress"));
}

}  // namespace pipecomm
