// The ranks of one process group as seen from one of them: post transfers, wait for them, learn of lost peers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/api.h"
#include "base/error.h"
#include "device/device.h"
#include "transport/api/wait.h"
#include "wire/message.h"

namespace pipecomm {

// What the user counts, of the section that a message belongs to; nothing where that belongs to none, or is not known.
using Iteration = std::optional<std::uint64_t>;

// When things happened, CLOCK_MONOTONIC nanoseconds; 0 = not yet.
struct TransferTimes {
  std::int64_t posted_ns = 0;
  std::int64_t started_ns = 0;  // first byte moved
  std::int64_t done_ns = 0;
};

// A message on its way. Thread-safe; may outlive its communicator.
class PC_API Transfer {
 public:
  virtual ~Transfer() = default;

  // On a CUDA device: also done there.
  virtual bool is_done() const = 0;
  // True when the tensors are not read or written any more. A send that failed halfway is done before that: its bytes
  // go on leaving, since half a message cannot be taken back.
  virtual bool has_left() const = 0;
  // The error the transfer ended with, if it ended with one.
  virtual std::optional<Error> error() const = 0;
  // Returns when the transfer is done: a sender may write to its tensors, a receiver may read its own.
  // Throws its error; throws LinkTimeout after `timeout` and cancels: the target is not written any more.
  // Tensors of a CUDA device: returns when the work is enqueued there, on streams of the transport; the caller's
  // streams then wait for event() before they touch the tensors, also where it throws: what was enqueued before is
  // still done.
  virtual void wait(Nanoseconds timeout, const InterruptCheck& interrupt = {}) = 0;
  // After wait(): the point in a stream of the transport at which the transfer is done; reached, where none took part.
  virtual Event event() const = 0;
  // Rank the message came from or goes to; kAnySource until one has matched.
  virtual int peer() const = 0;
  // Tensors received; only after wait().
  virtual std::vector<ReceivedPart>& parts() = 0;
  // Bytes of the tensors, and of what crossed the channel for them (headers included).
  virtual std::size_t payload_nbytes() const = 0;
  virtual std::size_t wire_nbytes() const = 0;
  virtual TransferTimes times() const = 0;
};

struct LinkCounters {
  std::uint64_t messages_sent = 0, messages_received = 0;
  std::uint64_t payload_nbytes_sent = 0, payload_nbytes_received = 0;
  std::uint64_t wire_nbytes_sent = 0, wire_nbytes_received = 0;
};

class PC_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Posts a message; returns at once. `keepalive` is dropped when the tensors have left. Tensors must be contiguous.
  // Tensors of a device are read after `ready`, a point of the caller's stream (Device::record).
  // Throws a config error for a bad peer (out of range, or this rank), a tensor error for tensors of two devices.
  virtual std::shared_ptr<Transfer> send(int peer, const MessageKey& key, std::vector<SendPart> parts,
                                         std::shared_ptr<void> keepalive, const Event& ready = {}) = 0;
  // Posts a receive from `peer` or kAnySource. With `targets`, dtypes and shapes must equal the sender's and the bytes
  // land there; without, memory comes from the pool, for a tensor of a device from that of this rank's device.
  // A mismatch is an error on both sides and consumes the message. Targets on a device are written after `ready`.
  virtual std::shared_ptr<Transfer> receive(int peer, const MessageKey& key, std::vector<TensorView> targets,
                                            std::shared_ptr<void> keepalive, const Event& ready = {}) = 0;

  // The point that `native_stream` (a cudaStream_t) of CUDA device `device_index` has reached, for `ready`. Throws a
  // config error for a stream under graph capture, and what opening the device throws.
  virtual Event record(int device_index, void* native_stream) = 0;

  // The caller's tensors lie there; a stand-in takes the host's place. nullptr for the host, else its device: from now
  // on, wait() leaves it to the caller to wait for event(), also for the stand-in, and what comes through the host
  // without a target lies in memory that the device copies from asynchronously. Throws as record().
  virtual std::shared_ptr<Device> use_device(int device_index) = 0;

  // Starts a section, which all ranks count alike: what is left of earlier epochs is cancelled here and dropped on
  // arrival. Texts name the section, or `iteration` where there is one.
  virtual void begin_epoch(std::uint32_t epoch, Iteration iteration = {}) = 0;
  // Gives up the current epoch on every rank: their transfers of this epoch raise StageFailed with `text`.
  virtual void abort(std::uint32_t epoch, const std::string& text) = 0;
  // The text of an abort of `epoch` that this rank or another has sent, if any.
  virtual std::optional<std::string> aborted(std::uint32_t epoch) const = 0;
  // When true, the loss of any rank fails the transfers with all of them (a pipeline needs every stage).
  virtual void set_fail_together(bool value) = 0;
  // Throws the error of a peer that is gone.
  virtual void check_peers() const = 0;

  // Cancels what is pending, says goodbye, frees everything. Idempotent. Transfers raise afterwards.
  virtual void close() = 0;
  virtual LinkCounters counters(int peer) const = 0;
  // That peer is on this host: bytes get there through memory of both.
  virtual bool shares_memory(int peer) const = 0;
  // How bytes get to that peer: "shared memory" or "TCP to <address>:<port>"; with tensors of a device sent there,
  // also ", in slots of <device>" or ", from <device> through the host".
  virtual std::string path(int peer) const = 0;
};

}  // namespace pipecomm
