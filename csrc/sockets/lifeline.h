// The socket between two ranks that stays open: its end of file means the peer is gone. It also carries the few
// control messages: ring set-up, aborts, goodbyes and complaints. Used under the progress lock only.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "base/error.h"
#include "memory/segment.h"
#include "sockets/doorbell.h"
#include "sockets/socket.h"

namespace pipecomm {

enum class ControlKind : std::uint32_t {
  ring_wanted = 1,   // to the receiver: make a ring, I have something to send
  ring_made = 2,     // to the sender: here it is (with a descriptor)
  refused = 3,       // to a sender: message number `value` could not be received; `error` and text say why
  abort = 4,         // epoch `value` is given up; text says why
  goodbye = 5,       // closed on purpose; text says which rank was lost before that, if one was
  accepted = 6,      // to a sender, in strict mode: a receive is posted for message number `value`
  lost = 7,          // this end of the link has failed, or a bridge's way to the peer; text says why
  slots_wanted = 8,  // to the receiver: share memory of your device, in way number `value` or a later one
  slots_made = 9,    // to the sender: here it is; `value` is SlotOffer::packed(), text the handle, or why there is none
  source_made = 10,  // to the receiver: segment number `value` of this process, for records that tell where to read
  source_gone = 11,  // it has gone back to the system, and no record tells of it any more
  parking = 12,      // to a sender: nothing more is taken from it, text says why; without a text: something is again
  gave_up = 13,      // a lost rank has ended all transfers of this process; text names it
};

struct Control {
  ControlKind kind;
  std::uint64_t value = 0;
  std::string text;
  Fd fd;
  ErrorKind error = ErrorKind::transport;  // of the text, where that is an error's; also for a kind not known here
};

// As a message of the socket, for those who relay it.
PC_API std::string pack_control(ControlKind kind, std::uint64_t value, const std::string& text,
                                ErrorKind error = ErrorKind::transport);
// Throws a transport error when it is none.
PC_API Control unpack_control(SocketMessage message);

class Lifeline {
 public:
  Lifeline(Fd socket, Segment peer_doorbell) : socket_(std::move(socket)), peer_doorbell_(std::move(peer_doorbell)) {}

  int fd() const { return socket_.get(); }
  bool is_open() const { return static_cast<bool>(socket_); }
  // The peer has closed its end, whether or not all it said before has been read.
  bool has_hung_up() const;
  // Queues and sends what the socket takes; the peer is woken to read it. What `fd` refers to is sent even
  // if it is closed meanwhile; throws a pool exhausted error without a descriptor for that.
  void send(ControlKind kind, std::uint64_t value, const std::string& text, int fd = -1);
  void send(ControlKind kind, std::uint64_t value, const Error& error);
  // Sends what is queued; true when nothing is left.
  bool flush();
  // The next control message; closes and gives nothing at end of file.
  std::optional<Control> receive();
  void wake_peer() { ring_doorbell(*reinterpret_cast<DoorbellWords*>(peer_doorbell_.data())); }
  void close() {
    socket_.reset();
    wake_peer();
  }

 private:
  struct Outgoing {
    std::string bytes;
    Fd fd;
  };
  void queue(Outgoing message);

  Fd socket_;
  Segment peer_doorbell_;
  std::deque<Outgoing> outgoing_;
};

}  // namespace pipecomm
