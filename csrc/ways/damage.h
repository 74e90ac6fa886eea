// What is said of a peer whose numbers cannot be those of a sound process.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"

namespace pipecomm {

[[noreturn]] inline void refuse_damaged(const std::string& expected, std::uint64_t got) {
  throw Error(ErrorKind::transport,
              "expected " + expected + "; got " + std::to_string(got) + ": the peer's process is damaged");
}

}  // namespace pipecomm
