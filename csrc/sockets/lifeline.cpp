// Control messages to bytes and back.
#include "sockets/lifeline.h"

#include <fcntl.h>
#include <poll.h>

#include <cerrno>
#include <cstring>

namespace pipecomm {
namespace {

struct Prefix {
  std::uint32_t kind;
  std::uint32_t error;
  std::uint64_t value;
};

ErrorKind known_error(std::uint32_t number) {
  return number < kNumErrorKinds ? static_cast<ErrorKind>(number) : ErrorKind::transport;
}

}  // namespace

std::string pack_control(ControlKind kind, std::uint64_t value, const std::string& text, ErrorKind error) {
  const Prefix prefix{static_cast<std::uint32_t>(kind), static_cast<std::uint32_t>(error), value};
  std::string bytes(reinterpret_cast<const char*>(&prefix), sizeof(prefix));
  return bytes + text.substr(0, kMaxSocketMessageNbytes - sizeof(prefix));
}

Control unpack_control(SocketMessage message) {
  Prefix prefix;
  if (message.bytes.size() < sizeof(prefix)) throw Error(ErrorKind::transport, "control message refused: too short");
  std::memcpy(&prefix, message.bytes.data(), sizeof(prefix));
  return {static_cast<ControlKind>(prefix.kind), prefix.value, message.bytes.substr(sizeof(prefix)),
          std::move(message.fd), known_error(prefix.error)};
}

bool Lifeline::has_hung_up() const { return !socket_ || pipecomm::has_hung_up(socket_); }

void Lifeline::send(ControlKind kind, std::uint64_t value, const std::string& text, int fd) {
  if (!socket_) return;
  Fd shared(fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (fd >= 0 && !shared) {
    throw Error(ErrorKind::pool_exhausted, "expected a descriptor to share memory by; got: " + describe_errno(errno));
  }
  queue({pack_control(kind, value, text), std::move(shared)});
}

void Lifeline::send(ControlKind kind, std::uint64_t value, const Error& error) {
  queue({pack_control(kind, value, error.what(), error.kind()), Fd()});
}

void Lifeline::queue(Outgoing message) {
  if (!socket_) return;
  outgoing_.push_back(std::move(message));
  flush();
}

bool Lifeline::flush() {
  while (socket_ && !outgoing_.empty()) {
    SocketStatus status = SocketStatus::closed;
    try {
      status = send_message(socket_, outgoing_.front().bytes, outgoing_.front().fd.get());
    } catch (const Error&) {
      // A link whose control messages cannot be sent is no link: it ends as if the peer had gone.
      outgoing_.clear();
      socket_.reset();
      return false;
    }
    if (status == SocketStatus::would_block) return false;
    // A closed socket is noticed by receive(), after the peer's last messages have been read.
    outgoing_.pop_front();
    wake_peer();
  }
  return true;
}

std::optional<Control> Lifeline::receive() {
  if (!socket_) return std::nullopt;
  SocketMessage message;
  const SocketStatus status = receive_message(socket_, message);
  if (status == SocketStatus::would_block) return std::nullopt;
  if (status == SocketStatus::closed) {
    socket_.reset();
    return std::nullopt;
  }
  return unpack_control(std::move(message));
}

}  // namespace pipecomm
