// What crosses the TCP stream between two bridges: a header of 8 bytes and a body, nothing else after the greeting.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>

#include "sockets/socket.h"

namespace pipecomm {

enum class FrameKind : std::uint32_t {
  control = 1,  // a message of the life line, without its descriptor
  record = 2,   // one record of the sender's ring
  taken = 3,    // 8 bytes: up to which position of the ring the receiver has taken the records
};

struct FrameHeader {
  FrameKind kind;
  std::uint32_t nbytes;
};

// Longer than any record of any ring.
inline constexpr std::uint32_t kMaxRecordNbytes = std::uint32_t{1} << 30;

// Reads frames. A header that has come along with the body before it costs no call of its own.
class FrameReader {
 public:
  explicit FrameReader(int socket) : socket_(socket) {}
  // None at the end of the stream. Throws a transport error for what is no header.
  std::optional<FrameHeader> next();
  // The body of the frame; false when the stream ends before it does.
  bool read_body(std::byte* out, std::size_t nbytes);

 private:
  const int socket_;
  std::array<std::byte, sizeof(FrameHeader)> header_{};
  std::size_t header_nbytes_ = 0;  // of header_ that have been read
};

// Frames that leave in one call. Bodies are not copied: they must stay until send() returns.
class FrameBatch {
 public:
  bool is_empty() const { return count_ == 0; }
  bool is_full() const { return count_ == kMaxFrames; }
  void add(FrameKind kind, const void* body, std::size_t nbytes);
  // Calls `when_stalled` each second in which nothing could be written; it may throw.
  void send(int socket, const std::function<void()>& when_stalled);

 private:
  static constexpr std::size_t kMaxFrames = 16;
  std::array<FrameHeader, kMaxFrames> headers_{};
  std::array<iovec, 2 * kMaxFrames> parts_{};
  std::size_t count_ = 0;
};

}  // namespace pipecomm
