// The checks and the texts.
#include "transport/meeting/greeting.h"

#include "wire/header.h"

namespace pipecomm {
namespace {

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

void Greeting::check_same(std::uint32_t version, int size, int peer) const {
  const std::string who = "rank " + std::to_string(peer);
  if (version != kWireVersion) {
    throw Error(ErrorKind::config, "expected wire version " + std::to_string(kWireVersion) + " from " + who + "; got " +
                                       std::to_string(version) + where() + "; install one pipecomm everywhere");
  }
  if (size != size_) {
    throw Error(ErrorKind::config, "expected " + std::to_string(size_) + " ranks; " + who + " was started for " +
                                       std::to_string(size) + where());
  }
}

void Greeting::fail_lost(int peer, const std::vector<std::string>& others) const {
  const std::string more = others.empty() ? "" : "; also gone, or not there yet: rank " + join(others);
  throw Error(ErrorKind::peer_lost, "rank " + std::to_string(peer) + " ended while connecting" + more + where() +
                                        "; look at its output for the cause");
}

void Greeting::fail_missing(const std::vector<std::string>& missing, Nanoseconds timeout) const {
  throw Error(ErrorKind::link_timeout, "expected all " + std::to_string(size_) + " ranks to connect within " +
                                           std::to_string(timeout.count() / 1'000'000'000) +
                                           " s; no answer from rank " + join(missing) + where() +
                                           "; check that it runs, or raise the timeout");
}

}  // namespace pipecomm
