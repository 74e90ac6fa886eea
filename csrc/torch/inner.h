// A backend whose collectives are another backend's, which is made at the first collective: a group that only sends
// and receives never pays for it.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "torch/python_lock.h"

namespace pipecomm {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using InnerPtr = c10::intrusive_ptr<c10d::Backend>;
using InnerFactory = std::function<InnerPtr()>;

class CollectivesByInner : public c10d::Backend {
 public:
  CollectivesByInner(int rank, int size, InnerFactory make_inner)
      : c10d::Backend(rank, size), make_inner_(std::move(make_inner)) {}

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return inner()->broadcast(tensors, opts);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return inner()->allreduce(tensors, opts);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return inner()->allreduce_sparse(tensors, opts);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return inner()->allreduce_coalesced(tensors, opts);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override { return inner()->reduce(tensors, opts); }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return inner()->allgather(outputs, inputs, opts);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return inner()->_allgather_base(output, input, opts);
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return inner()->allgather_coalesced(outputs, inputs, opts);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return inner()->allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return inner()->gather(outputs, inputs, opts);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override {
    return inner()->scatter(outputs, inputs, opts);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override {
    return inner()->reduce_scatter(outputs, inputs, opts);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return inner()->_reduce_scatter_base(output, input, opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return inner()->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    return inner()->alltoall_base(output, input, output_splits, input_splits, opts);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return inner()->alltoall(outputs, inputs, opts);
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override { return inner()->barrier(opts); }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    inner()->monitoredBarrier(opts, wait_all_ranks);
  }
  void setSequenceNumberForGroup() override { inner()->setSequenceNumberForGroup(); }
  std::uint64_t getSequenceNumberForGroup() override { return inner()->getSequenceNumberForGroup(); }

 protected:
  // Makes the inner backend at the first call, which every rank of the group has to reach.
  InnerPtr inner() {
    const InterpreterLockReleased released;
    const std::lock_guard<std::mutex> lock(inner_mutex_);
    if (is_closed_) {
      throw Error(ErrorKind::transport, "expected a process group in use; got a collective on a destroyed one, '" +
                                            getGroupUid() + "'; make a new group first");
    }
    if (!inner_) {
      inner_ = make_inner_();
      inner_->setGroupUid(getGroupUid());
      inner_->setGroupDesc(getGroupDesc());
    }
    return inner_;
  }
  // The inner backend if there is one already, else null.
  InnerPtr inner_if_made() {
    const InterpreterLockReleased released;
    const std::lock_guard<std::mutex> lock(inner_mutex_);
    return inner_;
  }
  // From here on collectives raise.
  void drop_inner() {
    const InterpreterLockReleased released;
    const std::lock_guard<std::mutex> lock(inner_mutex_);
    is_closed_ = true;
    inner_.reset();
  }

 private:
  const InnerFactory make_inner_;
  std::mutex inner_mutex_;
  // Guarded by inner_mutex_.
  InnerPtr inner_;
  bool is_closed_ = false;
};

}  // namespace pipecomm
