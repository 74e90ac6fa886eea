// torch's handle for one transfer. May outlive its group, be waited for twice, or from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "python/gil.h"
#include "torch/device.h"
#include "transport/api/communicator.h"

namespace pipecomm {

// The group's timeout in milliseconds, shared with its handles: a later setTimeout holds for them too.
using GroupTimeout = std::atomic<std::int64_t>;

class TransferWork : public c10d::Work {
 public:
  // The profiler's event is called `title` and shows the shapes of `tensors`; none without a title.
  TransferWork(c10d::OpType op_type, const char* title, const std::vector<at::Tensor>& tensors,
               std::shared_ptr<Transfer> transfer, std::shared_ptr<const GroupTimeout> timeout,
               std::vector<at::Tensor> received, int device_index)
      : c10d::Work(-1, op_type, title, title != nullptr ? std::optional(tensors) : std::nullopt),
        transfer_(std::move(transfer)),
        group_timeout_(std::move(timeout)),
        received_(std::move(received)),
        device_index_(device_index) {}

  // For a CUDA tensor, the caller's current stream then waits for the transfer, and the host only until it is enqueued.
  // 0, and the -1 that torch has for "not given", stand for the group's. Call without the interpreter lock.
  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout.count() < -1) {
      throw Error(ErrorKind::config,
                  "expected a timeout of more than 0 s to wait for; got " + std::to_string(timeout.count()) + " ms");
    }
    const std::chrono::milliseconds group_timeout(group_timeout_->load());
    try {
      transfer_->wait(timeout.count() > 0 ? timeout : group_timeout, check_signals);
    } catch (...) {
      block_callers_stream();
      throw;
    }
    block_callers_stream();
    if (recordFunctionEndCallback_ && !is_recorded_.test_and_set()) recordFunctionEndCallback_();
    return true;
  }

  bool isCompleted() override { return is_done(); }
  bool isSuccess() const override { return is_done() && !transfer_->error(); }
  std::exception_ptr exception() const override {
    const auto error = transfer_->error();
    return error ? std::make_exception_ptr(*error) : nullptr;
  }
  // The peer's rank in the group; -1 while an any-source receive has not matched.
  int sourceRank() const override { return transfer_->peer(); }
  // The tensor received into; empty for a send.
  std::vector<at::Tensor> result() override { return received_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    throw Error(
        ErrorKind::not_built,
        "expected wait() or is_completed() on the handle of a send or receive; got get_future(), which pipecomm "
        "has for collectives only");
  }

 private:
  bool is_done() const {
    return without_gil([this] { return transfer_->is_done(); });
  }

  // Also after an error: what was enqueued before may still read or write the tensor.
  void block_callers_stream() const {
    if (device_index_ != kOnHost) transfer_->event().block(current_stream(device_index_));
  }

  const std::shared_ptr<Transfer> transfer_;
  const std::shared_ptr<const GroupTimeout> group_timeout_;
  const std::vector<at::Tensor> received_;
  const int device_index_;
  std::atomic_flag is_recorded_;  // the profiler's event has ended
};

}  // namespace pipecomm
