// The directions' names.
#include "wire/message.h"

#include "base/error.h"

namespace pipecomm {
namespace {

constexpr const char* kDirectionNames[] = {"none", "forward", "backward"};

}  // namespace

const char* direction_name(Direction direction) { return kDirectionNames[static_cast<std::size_t>(direction)]; }

Direction direction_from_name(const std::string& name) {
  for (std::uint8_t value = 0; value < std::size(kDirectionNames); ++value) {
    if (name == kDirectionNames[value]) return static_cast<Direction>(value);
  }
  throw Error(ErrorKind::config, "expected direction forward, backward or none; got '" + name + "'");
}

}  // namespace pipecomm
