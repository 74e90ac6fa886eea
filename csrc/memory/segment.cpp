// memfd, seals and mappings behind Segment.
#include "memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "base/error.h"
#include "memory/addresses.h"
#include "memory/available.h"

namespace pipecomm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void throw_exhausted(std::size_t nbytes, const std::string& why) {
  throw Error(ErrorKind::pool_exhausted,
              "expected " + std::to_string(nbytes) + " bytes of shared memory from the system; got: " + why);
}

void check_seals(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw Error(ErrorKind::transport, "expected a memory segment sealed against resizing; got seals " +
                                          std::to_string(seals) + " on the descriptor the peer sent");
  }
}

std::size_t size_of(int fd) {
  struct stat status{};
  if (fstat(fd, &status) != 0) throw_errno("fstat of a received memory segment");
  return static_cast<std::size_t>(status.st_size);
}

void check_size(int fd, std::size_t expected_nbytes) {
  const std::size_t nbytes = size_of(fd);
  if (nbytes == expected_nbytes) return;
  throw Error(ErrorKind::transport, "expected a memory segment of " + std::to_string(expected_nbytes) + " bytes; got " +
                                        std::to_string(nbytes) + " bytes from the peer");
}

}  // namespace

std::size_t page_nbytes() {
  static const auto kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return kPage;
}

// fallocate of more than there is would wake the OOM killer instead of failing.
void check_available(std::size_t nbytes) {
  const AvailableMemory available = available_memory();
  if (nbytes <= available.nbytes) return;
  throw_exhausted(nbytes, std::to_string(available.nbytes) + " bytes available " + available.where);
}

Segment Segment::create(std::size_t nbytes) {
  if (nbytes == 0) throw Error(ErrorKind::config, "expected a memory segment of at least 1 byte; got 0");
  check_available(nbytes);
  Segment segment = create_sparse(nbytes);
  segment.fill(0, segment.nbytes_);
  segment.map();
  return segment;
}

Segment Segment::create_sparse(std::size_t nbytes) {
  Segment segment;
  segment.nbytes_ = round_up(nbytes, page_nbytes());
  segment.fd_ = memfd_create("pipecomm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (segment.fd_ < 0) throw_exhausted(nbytes, "memfd_create: " + describe_errno(errno));
  if (ftruncate(segment.fd_, static_cast<off_t>(segment.nbytes_)) != 0) throw_exhausted(nbytes, describe_errno(errno));
  if (fcntl(segment.fd_, F_ADD_SEALS, kSeals) != 0) throw_errno("sealing a memory segment");
  return segment;
}

void Segment::fill(std::size_t offset, std::size_t nbytes) {
  if (fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(nbytes)) != 0) {
    throw_exhausted(nbytes, describe_errno(errno));
  }
}

void Segment::empty(std::size_t offset, std::size_t nbytes) noexcept {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
}

Segment Segment::adopt(int fd, std::size_t expected_nbytes) {
  Segment segment;
  segment.fd_ = fd;
  segment.nbytes_ = round_up(expected_nbytes, page_nbytes());
  check_seals(fd);
  check_size(fd, segment.nbytes_);
  segment.map();
  segment.close_fd();
  return segment;
}

Segment Segment::adopt_to_read(int fd) {
  Segment segment;
  segment.fd_ = fd;
  check_seals(fd);
  segment.nbytes_ = size_of(fd);
  segment.data_ = map_to_read(fd, segment.nbytes_);
  if (segment.data_ == nullptr) throw_exhausted(segment.nbytes_, "mmap: " + describe_errno(errno));
  segment.close_fd();
  return segment;
}

void Segment::map() {
  data_ = reserve_addresses(nbytes_);
  if (data_ == nullptr || !map_shared_at(data_, fd_, 0, nbytes_)) {
    throw_exhausted(nbytes_, "mmap: " + describe_errno(errno));
  }
}

void Segment::close_fd() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

void Segment::swap(Segment& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, nbytes_);
  close_fd();
}

}  // namespace pipecomm
