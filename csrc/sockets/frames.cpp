// Frames to bytes of a stream and back.
#include "sockets/frames.h"

#include <cstring>
#include <string>

#include "base/error.h"
#include "sockets/tcp_socket.h"

namespace pipecomm {
namespace {

std::uint32_t max_nbytes(FrameKind kind) {
  switch (kind) {
    case FrameKind::control:
      return static_cast<std::uint32_t>(kMaxSocketMessageNbytes);
    case FrameKind::record:
      return kMaxRecordNbytes;
    case FrameKind::taken:
      return sizeof(std::uint64_t);
  }
  return 0;
}

void check(const FrameHeader& header) {
  if (max_nbytes(header.kind) > 0 && header.nbytes <= max_nbytes(header.kind)) return;
  throw Error(ErrorKind::transport, "expected a frame of a known kind and length; got kind " +
                                        std::to_string(static_cast<std::uint32_t>(header.kind)) + ", " +
                                        std::to_string(header.nbytes) + " bytes");
}

}  // namespace

std::optional<FrameHeader> FrameReader::next() {
  while (header_nbytes_ < header_.size()) {
    iovec part{header_.data() + header_nbytes_, header_.size() - header_nbytes_};
    const std::size_t got = read_some(socket_, &part, 1);
    if (got == 0) return std::nullopt;
    header_nbytes_ += got;
  }
  header_nbytes_ = 0;
  FrameHeader header;
  std::memcpy(&header, header_.data(), sizeof(header));
  check(header);
  return header;
}

bool FrameReader::read_body(std::byte* out, std::size_t nbytes) {
  for (std::size_t done = 0; done < nbytes;) {
    iovec parts[2] = {{out + done, nbytes - done}, {header_.data(), header_.size()}};
    const std::size_t got = read_some(socket_, parts, 2);
    if (got == 0) return false;
    done += got;
    if (done > nbytes) header_nbytes_ = done - nbytes;
  }
  return true;
}

void FrameBatch::add(FrameKind kind, const void* body, std::size_t nbytes) {
  headers_[count_] = {kind, static_cast<std::uint32_t>(nbytes)};
  parts_[2 * count_] = {&headers_[count_], sizeof(FrameHeader)};
  parts_[2 * count_ + 1] = {const_cast<void*>(body), nbytes};
  ++count_;
}

void FrameBatch::send(int socket, const std::function<void()>& when_stalled) {
  const std::size_t end = 2 * count_;
  for (std::size_t first = 0; first < end;) {
    const std::size_t sent = write_some(socket, &parts_[first], static_cast<int>(end - first));
    if (sent == 0) when_stalled();
    std::size_t left = sent;
    while (first < end && left >= parts_[first].iov_len) left -= parts_[first++].iov_len;
    if (first < end) {
      parts_[first].iov_base = static_cast<std::byte*>(parts_[first].iov_base) + left;
      parts_[first].iov_len -= left;
    }
  }
  count_ = 0;
}

}  // namespace pipecomm
