// Memfd segments: sealed, adopted, and refused where they cannot be trusted.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "check.h"
#include "memory/segment.h"

using namespace pipecomm;

namespace {

int memfd_of(std::size_t nbytes, int seals) {
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0);
  CHECK_EQ(ftruncate(fd, static_cast<off_t>(nbytes)), 0);
  if (seals != 0) CHECK_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
  return fd;
}

bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

}  // namespace

TEST(created_segment_is_zeroed_writable_and_whole_pages) {
  const Segment segment = Segment::create(5000);
  CHECK_EQ(segment.nbytes(), round_up(5000, page_nbytes()));
  for (std::size_t i = 0; i < segment.nbytes(); ++i) CHECK(segment.data()[i] == std::byte{0});
  std::memset(segment.data(), 7, segment.nbytes());
}

TEST(created_segment_cannot_be_resized_or_inherited) {
  const Segment segment = Segment::create(page_nbytes());
  CHECK(ftruncate(segment.fd(), 0) != 0);
  CHECK(ftruncate(segment.fd(), static_cast<off_t>(4 * page_nbytes())) != 0);
  CHECK(fcntl(segment.fd(), F_ADD_SEALS, F_SEAL_WRITE) != 0);
  CHECK((fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST(adopted_segment_shares_memory_with_its_maker) {
  const Segment made = Segment::create(8192);
  const Segment adopted = Segment::adopt(dup(made.fd()), 8192);
  made.data()[100] = std::byte{42};
  CHECK(adopted.data()[100] == std::byte{42});
  adopted.data()[8191] = std::byte{43};
  CHECK(made.data()[8191] == std::byte{43});
}

TEST(adopting_a_segment_that_could_shrink_is_refused_and_closes_it) {
  for (const int seals : {0, F_SEAL_SHRINK, F_SEAL_GROW | F_SEAL_SEAL}) {
    const int fd = memfd_of(8192, seals);
    CHECK_ERROR(ErrorKind::transport, "sealed", Segment::adopt(fd, 8192));
    CHECK(!is_open(fd));
  }
}

TEST(adopting_a_segment_of_another_size_is_refused_and_closes_it) {
  for (const std::size_t nbytes : {std::size_t{4096}, std::size_t{12288}}) {
    const int fd = memfd_of(nbytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    CHECK_ERROR(ErrorKind::transport, "8192", Segment::adopt(fd, 8192));
    CHECK(!is_open(fd));
  }
}

TEST(adopting_something_else_than_a_segment_is_refused) {
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  CHECK_ERROR(ErrorKind::transport, "", Segment::adopt(ends[0], 8192));
  CHECK(!is_open(ends[0]));
  close(ends[1]);
}

TEST(empty_and_huge_segments_are_refused) {
  CHECK_ERROR(ErrorKind::config, "0", Segment::create(0));
  CHECK_ERROR(ErrorKind::pool_exhausted, "available", Segment::create(std::size_t{1} << 60));
}

TEST(moved_segment_keeps_its_mapping_and_closes_once) {
  Segment first = Segment::create(4096);
  std::byte* data = first.data();
  const int fd = first.fd();
  Segment second = std::move(first);
  CHECK(!first);
  CHECK(second.data() == data);
  second = Segment::create(8192);
  CHECK(!is_open(fd) || second.fd() == fd);
  second = Segment();
  CHECK(!second);
}

CHECK_MAIN()
