// The torch.distributed backend: sends and receives through a Communicator, collectives through an inner backend.
#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch/inner.h"
#include "torch/tensors.h"
#include "torch/work.h"
#include "transport/api/communicator.h"

namespace pipecomm {

// Which messages are quantized. Every rank of a group has the same rule, so that both ends of a message agree.
struct CodecRule {
  CodecSpec to_higher;     // to higher ranks: activations
  CodecSpec to_lower;      // to lower ranks: activation gradients
  std::size_t min_nbytes;  // smaller messages are not

  // Coded, or would be in the other direction: the shape then crosses too, because groups lie inside a row.
  bool covers(const TensorView& tensor) const {
    return is_coded(to_higher, tensor.dtype, tensor.nbytes(), min_nbytes) ||
           is_coded(to_lower, tensor.dtype, tensor.nbytes(), min_nbytes);
  }
};

class PipecommBackend : public CollectivesByInner {
 public:
  // Without a communicator (ranks of several users) everything goes through the inner backends.
  PipecommBackend(int rank, int size, std::shared_ptr<Communicator> communicator, InnerNames inner_names,
                  InnerFactory make_inner, std::shared_ptr<GroupTimeout> timeout, const CodecRule& rule)
      : CollectivesByInner(rank, size, std::move(inner_names), std::move(make_inner)),
        communicator_(std::move(communicator)),
        timeout_(std::move(timeout)),
        rule_(rule) {}

  ~PipecommBackend() override {
    try {
      shutdown();
    } catch (...) {  // A destructor has nobody to tell.
    }
  }

  const std::string getBackendName() const override { return "pipecomm"; }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    if (!communicator_) return inner(tensors)->send(tensors, peer, tag);
    const at::Tensor tensor = ready_to_send(checked_tensor(tensors, "send"));
    SendPart part;
    part.tensor = flat_unless_covered(view_to_send(tensor));
    if (rule_.covers(part.tensor)) part.codec = peer > getRank() ? rule_.to_higher : rule_.to_lower;
    auto transfer =
        communicator_->send(peer, key_of(tag), {std::move(part)}, keepalive(tensor), ready_of(*communicator_, tensor));
    return make_work(c10d::OpType::SEND, "pipecomm:send", tensors, std::move(transfer), {});
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    if (!communicator_) return inner(tensors)->recv(tensors, peer, tag);
    return receive(tensors, peer, tag, c10d::OpType::RECV, "pipecomm:recv");
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    if (!communicator_) return inner(tensors)->recvAnysource(tensors, tag);
    return receive(tensors, kAnySource, tag, c10d::OpType::RECVANYSOURCE, "pipecomm:recvAnySource");
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_->store(timeout.count());
    for (const InnerPtr& made : made_inners()) made->setTimeout(timeout);
  }

  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_->load()); }

  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), timeout());
  }

  // Cancels what is pending: its waits raise. Idempotent.
  void shutdown() override {
    without_gil([this] {
      if (communicator_) communicator_->close();
      for (const InnerPtr& made : made_inners()) made->shutdown();
      drop_inners();
    });
  }

  void abort() override {
    without_gil([this] {
      if (communicator_) communicator_->close();
      for (const InnerPtr& made : made_inners()) made->abort();
    });
  }

 private:
  static MessageKey key_of(int tag) {
    if (tag < 0) throw Error(ErrorKind::config, "expected a tag of at least 0; got " + std::to_string(tag));
    MessageKey key;
    key.tag = tag;
    return key;
  }

  // Only the memory: a whole tensor may have a Python object, which the comm thread must not be the last to hold.
  static std::shared_ptr<void> keepalive(const at::Tensor& tensor) {
    return std::make_shared<c10::Storage>(tensor.storage());
  }

  // As torch users expect, only dtype and number of elements have to match, except where groups lie inside rows.
  TensorView flat_unless_covered(TensorView tensor) const {
    if (!rule_.covers(tensor)) tensor.shape = {tensor.numel()};
    return tensor;
  }

  WorkPtr receive(Tensors& tensors, int peer, int tag, c10d::OpType op_type, const char* title) {
    const at::Tensor& tensor = checked_tensor(tensors, "receive into");
    check_receivable(tensor);
    TensorView target = flat_unless_covered(view_to_receive(tensor));
    auto transfer = communicator_->receive(peer, key_of(tag), {std::move(target)}, keepalive(tensor),
                                           ready_of(*communicator_, tensor));
    return make_work(op_type, title, tensors, std::move(transfer), tensors);
  }

  WorkPtr make_work(c10d::OpType op_type, const char* title, const Tensors& tensors, std::shared_ptr<Transfer> transfer,
                    Tensors received) const {
    return c10::make_intrusive<TransferWork>(op_type, at::hasCallbacks() ? title : nullptr, tensors,
                                             std::move(transfer), timeout_, std::move(received),
                                             device_index_of(tensors.front()));
  }

  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<GroupTimeout> timeout_;
  const CodecRule rule_;
};

}  // namespace pipecomm
