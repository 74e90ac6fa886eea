// Control messages as bytes.
#include <cstring>

#include "check.h"
#include "sockets/lifeline.h"

using namespace pipecomm;

namespace {

Control crossed(const std::string& bytes) {
  SocketMessage message;
  message.bytes = bytes;
  return unpack_control(std::move(message));
}

}  // namespace

TEST(every_kind_of_error_crosses_with_its_text) {
  for (int number = 0; number < kNumErrorKinds; ++number) {
    const auto kind = static_cast<ErrorKind>(number);
    const Control control = crossed(pack_control(ControlKind::refused, 7, "why", kind));
    CHECK(control.kind == ControlKind::refused && control.error == kind);
    CHECK_EQ(control.value, std::uint64_t{7});
    CHECK_EQ(control.text, std::string("why"));
  }
}

TEST(error_of_an_unknown_kind_is_a_transport_error) {
  for (const std::uint32_t number : {static_cast<std::uint32_t>(kNumErrorKinds), 255u, 256u, 0xffffffffu}) {
    std::string bytes = pack_control(ControlKind::refused, 7, "why", ErrorKind::config);
    std::memcpy(bytes.data() + sizeof(std::uint32_t), &number, sizeof(number));
    CHECK(crossed(bytes).error == ErrorKind::transport);
  }
}

TEST(control_message_that_is_too_short_is_refused) {
  CHECK_ERROR(ErrorKind::transport, "too short", crossed(std::string(15, '\0')));
}

CHECK_MAIN()
