// The hello's bytes.
#include "transport/meeting/hello.h"

#include <algorithm>
#include <cstring>

#include "wire/header.h"

namespace pipecomm {
namespace {

constexpr std::size_t kMaxTextNbytes = kMaxSocketMessageNbytes - sizeof(Hello);
constexpr char kMagic[8] = {'p', 'i', 'p', 'e', 'c', 'o', 'm', 'm'};

}  // namespace

std::string hello_bytes(int rank, int size, const std::string& token, const std::string& refusal) {
  const std::string fitting = refusal.substr(0, kMaxTextNbytes);
  Hello hello{};
  std::memcpy(hello.magic, kMagic, sizeof(kMagic));
  hello.version = kWireVersion;
  hello.rank = rank;
  hello.size = size;
  hello.is_refusal = refusal.empty() ? 0 : 1;
  hello.text_nbytes = static_cast<std::uint32_t>(fitting.size());
  std::memcpy(hello.token, token.data(), std::min(token.size(), sizeof(hello.token)));
  return std::string(reinterpret_cast<const char*>(&hello), sizeof(hello)) + fitting;
}

Hello Visitor::hello() const {
  Hello hello{};
  std::memcpy(&hello, bytes.data(), std::min(bytes.size(), sizeof(hello)));
  return hello;
}

std::size_t Visitor::whole_nbytes() const {
  return sizeof(Hello) + (bytes.size() < sizeof(Hello) ? 0 : hello().text_nbytes);
}

bool Visitor::knows(const std::string& token) const {
  const Hello said = hello();
  return bytes.size() >= sizeof(Hello) && std::memcmp(said.magic, kMagic, sizeof(kMagic)) == 0 &&
         said.text_nbytes <= kMaxTextNbytes && token.compare(0, token.size(), said.token, sizeof(said.token)) == 0;
}

}  // namespace pipecomm
