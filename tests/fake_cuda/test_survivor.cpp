// A peer dies while the survivor's device waits for it and a thread of the survivor is in a call that waits for the
// device.
#include <signal.h>
#include <sys/prctl.h>

#include "tensors.h"

namespace {

void tell(int fd, const std::string& text) {
  CHECK(::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

std::string hear(int fd) {
  char buffer[512];
  const ssize_t count = ::read(fd, buffer, sizeof(buffer));
  CHECK(count > 0);
  return std::string(buffer, static_cast<std::size_t>(count));
}

// Rank 1, which tells of a message that its device never writes.
[[noreturn]] void be_the_peer(int from_parent, int to_parent) {
  const auto listener = make_listener();
  tell(to_parent, listener->address());
  const auto communicator = listener->connect(1, {hear(from_parent), listener->address()}, {}, 10s);
  const CudaTensor tensor(1, 1000);
  communicator->send(0, tagged(0), {tensor.part()}, nullptr)->wait(10s);
  const HeldStream held(1);
  const auto send = communicator->send(0, tagged(1), {tensor.part()}, nullptr, communicator->record(1, held.native()));
  while (true) ::pause();
}

struct Peer {
  Peer() {
    CHECK(::pipe(to_child) == 0 && ::pipe(to_parent) == 0);
    pid = ::fork();
    if (pid == 0) ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (pid == 0) be_the_peer(to_child[0], to_parent[1]);
    const auto listener = make_listener();
    const std::string address = hear(to_parent[0]);
    tell(to_child[1], listener->address());
    communicator = listener->connect(0, {listener->address(), address}, {}, 10s);
  }

  int to_child[2], to_parent[2];
  pid_t pid = 0;
  std::shared_ptr<Communicator> communicator;
};

}  // namespace

TEST(survivor_is_let_go_while_a_thread_waits_for_its_device) {
  Peer peer;
  const CudaTensor got(0, 1000), other(0, 1000);
  auto first = peer.communicator->receive(1, tagged(0), {got.view()}, nullptr);
  CHECK(comes_true([&] { return first->is_done(); }));
  auto receive = peer.communicator->receive(1, tagged(1), {got.view()}, nullptr);
  auto waiting = peer.communicator->receive(1, tagged(2), {other.view()}, nullptr);
  CHECK(comes_true([&] { return peer.communicator->counters(1).messages_received == 2; }));
  Beside draining([] {
    void* data = nullptr;
    cudaMalloc(&data, 512);
  });
  CHECK(!draining.is_done_within(100ms));
  ::kill(peer.pid, SIGKILL);
  CHECK(draining.is_done_within(5s));
  Beside ends([&] { CHECK_ERROR(ErrorKind::peer_lost, "rank 1", waiting->wait(30s)); });
  CHECK(ends.is_done_within(5s));
  CHECK(comes_true([&] { return receive->is_done(); }));
  CHECK_ERROR(ErrorKind::peer_lost, "rank 1", throw Error(receive->error().value()));
}

CHECK_MAIN()
