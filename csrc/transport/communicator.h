// The ranks of one process group as seen from one of them: post transfers, wait for them, learn of lost peers.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/api.h"
#include "base/error.h"
#include "device/device.h"
#include "memory/pool.h"
#include "wire/message.h"

namespace pipecomm {

using Nanoseconds = std::chrono::nanoseconds;
// Called at least every 100 ms from a waiting thread; may throw to end the wait (the transfer is then cancelled).
using InterruptCheck = std::function<void()>;

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
  // True when the tensors are not read or written any more. A send that failed half way is done before that: its bytes
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

// A slow link, emulated by the sender stamping each chunk with the time it would have arrived.
struct LinkEmulation {
  double bytes_per_s = 0;  // 0 = no limit
  double latency_s = 0;
  bool is_on() const { return bytes_per_s > 0 || latency_s > 0; }
};

// What may be on its way to one peer. Equal on all ranks.
struct FlowLimits {
  std::size_t max_nbytes = std::size_t{4} << 20;  // of records that the peer has not taken: its ring's size
  std::size_t max_messages = 0;                   // whose last byte the peer has not taken; 0 = no limit
  // On their way from this process, over all links of all groups: a link that has something on its way begins no
  // message at or above this. 0 = no limit.
  std::size_t max_process_messages = 0;
  std::size_t max_process_nbytes = 0;
  bool backward_first = true;  // activation gradients overtake what has not begun to leave
  // Rendezvous: a send is done only when its receive is posted. Makes a test hang, and fail by its timeout, wherever
  // the order of sends and receives works only because small messages are eager.
  bool is_strict = false;
};

// Sent, and not taken by the peer.
struct InFlight {
  std::size_t num_messages = 0;
  std::size_t nbytes = 0;
};

struct CommunicatorOptions {
  std::string name;      // shown in errors: the process group's
  std::string settings;  // peers whose text differs refuse to connect
  FlowLimits limits;
  std::size_t max_parked_nbytes = std::size_t{256} << 20;
  LinkEmulation emulation;
  std::shared_ptr<Pool> pool;  // where messages without a target, and unexpected ones, are put
  // Treats tensors of the host as this device's (make_host_device), so that they cross in slots.
  std::shared_ptr<Device> stand_in;
  Nanoseconds finish_timeout = std::chrono::seconds(5);  // close() waits for devices at most this long
  // Opens the device of the first tensor on one; tests put the host there.
  std::function<std::shared_ptr<Device>(int)> open_device = make_cuda_device;
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

  // Starts a step: what is left of earlier epochs is cancelled here and dropped on arrival.
  virtual void begin_epoch(std::uint32_t epoch) = 0;
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

// Half-made communicator: an address to publish, then connect() once everybody's is known.
class PC_API Listener {
 public:
  virtual ~Listener() = default;
  // Opaque text: machine identity, socket name, secret, and the TCP endpoint once there is one. To be given to the
  // other ranks only.
  virtual std::string address() const = 0;
  // Listens at an address of this host (a number, not a name) too. Every rank does where some two are remote, before
  // it publishes its address for good.
  virtual void listen_tcp(const std::string& host) = 0;
  // Connects to every rank (addresses[i] is rank i's) and closes the listening sockets. Throws a transport error that
  // names the ranks that did not answer by the deadline, and one for a peer that why_unreachable() is about.
  virtual std::shared_ptr<Communicator> connect(int rank, const std::vector<std::string>& addresses,
                                                CommunicatorOptions options, Nanoseconds timeout,
                                                const InterruptCheck& interrupt = {}) = 0;
};

PC_API std::unique_ptr<Listener> make_listener();
// For the end of the process: returns when ranks on other hosts have what was sent to them, or after 5 s. exit() calls
// it; who ends by _exit() calls it himself.
PC_API void finish_bridges();
// Whether two ranks share no memory and need TCP: other hosts, other network namespaces. The same seen from both, and
// an equivalence: all ranks can decide alike.
PC_API bool is_remote(const std::string& own_address, const std::string& peer_address);
// Why `peer_address` cannot be reached at all (another user on this host); empty when it can.
PC_API std::string why_unreachable(const std::string& own_address, const std::string& peer_address);

}  // namespace pipecomm
