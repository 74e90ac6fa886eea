// A backend whose collectives are other backends', one for each device type. Each is made at the first collective on a
// tensor of its devices: a group that only sends and receives never pays for it.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "python/gil.h"

namespace pipecomm {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using InnerPtr = c10::intrusive_ptr<c10d::Backend>;
// Makes the backend of that name; all ranks have to be there within the time given, where that is less than the
// group's.
using InnerFactory = std::function<InnerPtr(const std::string&, std::chrono::milliseconds)>;
// The names by device type: "cpu", "cuda". "cpu" is there; its backend also runs what has no tensors, and other
// devices'.
using InnerNames = std::map<std::string, std::string>;

class CollectivesByInner : public c10d::Backend {
 public:
  CollectivesByInner(int rank, int size, InnerNames names, InnerFactory make_inner)
      : c10d::Backend(rank, size), names_(std::move(names)), make_inner_(std::move(make_inner)) {}

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return inner(tensors, opts)->broadcast(tensors, opts);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return inner(tensors, opts)->allreduce(tensors, opts);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return inner(tensors, opts)->allreduce_sparse(tensors, opts);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return inner(tensors, opts)->allreduce_coalesced(tensors, opts);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return inner(tensors, opts)->reduce(tensors, opts);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return inner(inputs, opts)->allgather(outputs, inputs, opts);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return inner(input, opts)->_allgather_base(output, input, opts);
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return inner(inputs, opts)->allgather_coalesced(outputs, inputs, opts);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return inner(inputs, opts)->allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return inner(inputs, opts)->gather(outputs, inputs, opts);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override {
    return inner(outputs, opts)->scatter(outputs, inputs, opts);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override {
    return inner(outputs, opts)->reduce_scatter(outputs, inputs, opts);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return inner(output, opts)->_reduce_scatter_base(output, input, opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return inner(outputs, opts)->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    return inner(output, opts)->alltoall_base(output, input, output_splits, input_splits, opts);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return inner(outputs, opts)->alltoall(outputs, inputs, opts);
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override { return inner(Tensors{}, opts)->barrier(opts); }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    inner(Tensors{}, opts)->monitoredBarrier(opts, wait_all_ranks);
  }
  void setSequenceNumberForGroup() override { inner()->setSequenceNumberForGroup(); }
  std::uint64_t getSequenceNumberForGroup() override { return inner()->getSequenceNumberForGroup(); }

 protected:
  // The backend for a call with these tensors, by the first one. Made at the first call, which every rank of the group
  // has to reach within the call's own timeout.
  template <typename Options>
  InnerPtr inner(const at::Tensor& tensor, const Options& opts) {
    return inner_for(tensor, opts.timeout);
  }
  template <typename Options>
  InnerPtr inner(const Tensors& tensors, const Options& opts) {
    return tensors.empty() ? inner_without_tensors(opts.timeout) : inner_for(tensors.front(), opts.timeout);
  }
  // For calls that have no timeout of their own.
  InnerPtr inner(const Tensors& tensors) { return inner_for(tensors.front(), c10d::kUnsetTimeout); }
  InnerPtr inner() { return inner_without_tensors(c10d::kUnsetTimeout); }
  // Those that there are so far.
  std::vector<InnerPtr> made_inners() {
    return without_gil([this] {
      const std::lock_guard<std::mutex> lock(inner_mutex_);
      std::vector<InnerPtr> made;
      for (const auto& [name, backend] : inners_) made.push_back(backend);
      return made;
    });
  }
  // From here on collectives raise.
  void drop_inners() {
    without_gil([this] {
      const std::lock_guard<std::mutex> lock(inner_mutex_);
      is_closed_ = true;
      inners_.clear();
    });
  }

 private:
  InnerPtr inner_for(const at::Tensor& tensor, std::chrono::milliseconds timeout) {
    const auto name = names_.find(c10::DeviceTypeName(tensor.device().type(), true));
    return name == names_.end() ? inner_without_tensors(timeout) : inner_named(name->second, timeout);
  }
  InnerPtr inner_without_tensors(std::chrono::milliseconds timeout) { return inner_named(names_.at("cpu"), timeout); }

  InnerPtr inner_named(const std::string& name, std::chrono::milliseconds timeout) {
    return without_gil([&] { return made_or_known(name, timeout); });
  }

  InnerPtr made_or_known(const std::string& name, std::chrono::milliseconds timeout) {
    const std::lock_guard<std::mutex> lock(inner_mutex_);
    if (is_closed_) {
      throw Error(ErrorKind::transport, "expected a process group in use; got a collective on a destroyed one, '" +
                                            getGroupUid() + "'; make a new group first");
    }
    if (const auto made = inners_.find(name); made != inners_.end()) return made->second;
    const InnerPtr made = make_inner_(name, timeout);
    made->setGroupUid(getGroupUid());
    made->setGroupDesc(getGroupDesc());
    if (getBoundDeviceId()) made->setBoundDeviceId(getBoundDeviceId());
    inners_.emplace(name, made);
    return made;
  }

  const InnerNames names_;
  const InnerFactory make_inner_;
  std::mutex inner_mutex_;
  // Guarded by inner_mutex_.
  std::map<std::string, InnerPtr> inners_;
  bool is_closed_ = false;
};

}  // namespace pipecomm
