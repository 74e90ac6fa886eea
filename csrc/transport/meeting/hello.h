// The first words of a rank to another: who it is, that it belongs here, and why it refuses if it does.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "sockets/socket.h"

namespace pipecomm {

struct Hello {
  char magic[8];
  std::uint32_t version;
  std::int32_t rank;
  std::int32_t size;
  std::uint32_t is_refusal;
  std::uint32_t text_nbytes;  // that follow
  std::uint32_t reserved;
  char token[32];  // the listener's whom it is for
};
static_assert(sizeof(Hello) == 64);

// A hello and its text, why it refuses; both are sent in one piece. Without a text it is no refusal.
std::string hello_bytes(int rank, int size, const std::string& token, const std::string& refusal);

// Somebody at the other end of a socket, of whom a hello and then its text are read.
struct Visitor {
  Fd socket;
  std::chrono::steady_clock::time_point until;  // to have said it
  std::string bytes;
  Fd doorbell;  // that came with it

  // Of bytes that hold one.
  Hello hello() const;
  std::string text() const { return bytes.substr(sizeof(Hello)); }
  // How long hello and text are, as far as is known.
  std::size_t whole_nbytes() const;
  // The hello is one, and for the listener with this token. Nothing else of it is to be believed before.
  bool knows(const std::string& token) const;
};

}  // namespace pipecomm
