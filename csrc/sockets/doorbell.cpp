// The futex calls.
#include "sockets/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <new>

namespace pipecomm {
namespace {

void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

void futex_wait(std::atomic<std::uint32_t>& word, int operation, std::uint32_t seen, std::chrono::nanoseconds at_most) {
  if (at_most.count() <= 0) return;
  const timespec timeout{at_most.count() / 1'000'000'000, at_most.count() % 1'000'000'000};
  futex(word, operation, seen, &timeout);
}

}  // namespace

void ring_doorbell(DoorbellWords& words) {
  words.rings.fetch_add(1);
  if (words.sleepers.load() > 0) futex(words.rings, FUTEX_WAKE, INT_MAX, nullptr);
}

Doorbell::Doorbell() : segment_(Segment::create(kDoorbellNbytes)) { new (segment_.data()) DoorbellWords{}; }

std::uint32_t Doorbell::listen() {
  words().sleepers.fetch_add(1);
  return words().rings.load();
}

void Doorbell::stop_listening() { words().sleepers.fetch_sub(1); }

void Doorbell::sleep(std::uint32_t seen, std::chrono::nanoseconds at_most) {
  futex_wait(words().rings, FUTEX_WAIT, seen, at_most);
  stop_listening();
}

void futex_wait_private(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds at_most) {
  futex_wait(word, FUTEX_WAIT_PRIVATE, seen, at_most);
}

void futex_wake_private(std::atomic<std::uint32_t>& word) { futex(word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr); }

}  // namespace pipecomm
