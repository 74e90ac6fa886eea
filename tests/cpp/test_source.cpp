// Tensors in pool memory, read by the receiver where they lie: who may touch what and when, and damaged peers.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <set>

#include "check.h"
#include "communicators.h"
#include "memory/segment_directory.h"
#include "ways/ring.h"
#include "ways/source.h"

namespace {

constexpr std::size_t kCount = 300'000;  // floats: more than a chunk, and than fits into a ring of 1 MiB

const std::shared_ptr<Pool>& pool() {
  static const auto kPool = make_host_pool(0);
  return kPool;
}

// Floats in memory of the pool.
struct Pooled {
  explicit Pooled(const Floats& values) : count(values.size()), block(allocate_block(pool(), 4 * values.size())) {
    set(values);
  }
  void set(const Floats& values) { std::memcpy(block.data(), values.data(), 4 * count); }
  SendPart part() const {
    SendPart made;
    made.tensor = {block.data(), DType::float32, {static_cast<std::int64_t>(count)}};
    made.codec = parse_codec("raw");
    return made;
  }
  std::size_t count;
  Block block;
};

std::shared_ptr<Transfer> post(const CommunicatorPtr& from, int peer, const Pooled& values, const MessageKey& key = {},
                               std::shared_ptr<void> keepalive = nullptr) {
  return from->send(peer, key, {values.part()}, std::move(keepalive));
}

CommunicatorOptions small_ring() {
  CommunicatorOptions options;
  options.limits.max_nbytes = 1 << 20;
  return options;
}

Floats received(const CommunicatorPtr& at, const MessageKey& key = {}, std::size_t count = kCount) {
  Floats got(count);
  post_receive(at, 0, got, key)->wait(10s);
  return got;
}

std::size_t num_mapped_to_read() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find(" r--s ") != std::string::npos && line.find("memfd:pipecomm") != std::string::npos;
  }
  return count;
}

const std::byte* bytes_of(const Block& block) { return static_cast<const std::byte*>(block.data()); }

// Both ends of the offers, without a link between them.
struct Ends {
  SourceReader reader;
  std::set<std::uint64_t> offered;
  SourceWriter writer{[this](std::uint64_t id, int fd) {
    fd < 0 ? (void)offered.erase(id) : (void)offered.insert(id);
    fd < 0 ? reader.remove(id) : reader.add(id, dup(fd));
  }};
  // As the reader finds it, note by note.
  std::string read(const std::byte* data, std::size_t nbytes) {
    CHECK(writer.offer(data, nbytes));
    std::string text;
    while (text.size() < nbytes) {
      const SourceNote note = SourceWriter::note(data + text.size(), nbytes - text.size());
      text.append(reinterpret_cast<const char*>(reader.find(note)), note.nbytes);
    }
    return text;
  }
};

std::string random_text(std::size_t nbytes) {
  std::mt19937 random(1);
  std::string text(nbytes, ' ');
  for (char& letter : text) letter = static_cast<char>(random());
  return text;
}

}  // namespace

TEST(pool_tensor_is_read_where_it_lies_and_its_send_is_done_when_it_was) {
  auto ranks = connect_all(2, small_ring());
  Pooled pooled(ramp(kCount));
  Floats small(8);
  auto send = post(ranks[0], 1, pooled);
  post_send(ranks[0], 1, small, tagged(1))->wait(10s);  // behind it, and it is no obstacle
  CHECK(!send->is_done());
  pooled.set(ramp(kCount, 5));  // nobody may do that, but it shows
  CHECK(received(ranks[1]) == ramp(kCount, 5));
  send->wait(10s);
  CHECK(send->has_left());
}

TEST(both_sides_may_send_pool_tensors_first_that_fit_into_the_ring) {
  auto ranks = connect_all(2);
  Pooled up(Floats(1'000'000, 1)), down(Floats(1'000'000, 2));
  auto first = post(ranks[0], 1, up), second = post(ranks[1], 0, down);
  first->wait(10s);
  second->wait(10s);
  up.set(Floats(1'000'000, 3));
  CHECK(received(ranks[1], {}, 1'000'000) == Floats(1'000'000, 1));
}

TEST(pool_tensors_keep_their_place_among_other_messages) {
  auto ranks = connect_all(2, small_ring());
  std::vector<Pooled> pooled;
  std::vector<Floats> plain;
  std::vector<std::shared_ptr<Transfer>> sends;
  for (int i = 0; i < 20; ++i) {
    plain.push_back(Floats(kCount, static_cast<float>(2 * i)));
    pooled.emplace_back(Floats(kCount, static_cast<float>(2 * i + 1)));
  }
  for (std::size_t i = 0; i < 20; ++i) {
    sends.push_back(post_send(ranks[0], 1, plain[i]));
    sends.push_back(post(ranks[0], 1, pooled[i]));
  }
  for (int i = 0; i < 40; ++i) CHECK(received(ranks[1]) == Floats(kCount, static_cast<float>(i)));
  for (const auto& send : sends) send->wait(10s);
}

TEST(message_of_plain_and_pool_tensors_arrives_whole) {
  auto ranks = connect_all(2, small_ring());
  Floats plain = ramp(kCount);
  Pooled pooled(ramp(kCount, 7));
  auto send = ranks[0]->send(1, {}, {part(plain), pooled.part(), part(plain, "int8"), pooled.part()}, nullptr);
  auto receive = ranks[1]->receive(0, {}, {}, nullptr);
  receive->wait(10s);
  send->wait(10s);
  const auto& parts = receive->parts();
  CHECK_EQ(parts.size(), std::size_t{4});
  CHECK(std::memcmp(parts[0].block.data(), plain.data(), 4 * kCount) == 0);
  CHECK(std::memcmp(parts[1].block.data(), pooled.block.data(), 4 * kCount) == 0);
  CHECK(std::memcmp(parts[3].block.data(), pooled.block.data(), 4 * kCount) == 0);
  CHECK_EQ(receive->payload_nbytes(), 16 * kCount);
  CHECK_EQ(receive->wire_nbytes(), send->wire_nbytes());
}

TEST(pool_tensor_of_a_send_that_timed_out_is_kept_until_it_is_taken) {
  auto ranks = connect_all(2, small_ring());
  const auto pooled = std::make_shared<Pooled>(ramp(kCount));
  auto send = post(ranks[0], 1, *pooled, {}, pooled);
  CHECK_ERROR(ErrorKind::link_timeout, "rank 1", send->wait(50ms));
  CHECK(!send->has_left());
  CHECK(received(ranks[1]) == ramp(kCount));
  post(ranks[0], 1, *pooled, tagged(1));
  received(ranks[1], tagged(1));
  CHECK(send->has_left());
}

TEST(pool_tensor_of_a_step_given_up_is_dropped) {
  auto ranks = connect_all(2, small_ring());
  Pooled old(Floats(kCount, 1)), fresh(Floats(kCount, 2));
  for (const auto& rank : ranks) rank->begin_epoch(1);
  auto send = post(ranks[0], 1, old, in_epoch(1));
  ranks[1]->abort(1, "boom");
  CHECK_ERROR(ErrorKind::stage_failed, "boom", send->wait(10s));
  for (const auto& rank : ranks) rank->begin_epoch(2);
  post(ranks[0], 1, fresh, in_epoch(2));
  CHECK(received(ranks[1], in_epoch(2)) == Floats(kCount, 2));
}

TEST(pool_tensor_that_nobody_took_before_closing_is_an_error_on_both_sides) {
  auto ranks = connect_all(2, small_ring());
  Pooled pooled(ramp(kCount));
  Floats small = ramp(8), got(8);
  auto send = post(ranks[0], 1, pooled, tagged(1));
  post_send(ranks[0], 1, small, tagged(2))->wait(10s);
  ranks[0]->close();
  CHECK_ERROR(ErrorKind::transport, "closed", send->wait(10s));
  pooled.set(Floats(kCount, 9));
  CHECK_ERROR(ErrorKind::transport, "has left", received(ranks[1], tagged(1)));
  post_receive(ranks[1], 0, got, tagged(2))->wait(10s);
  CHECK(got == small);
}

TEST(closing_waits_for_a_peer_that_takes_a_pool_tensor) {
  auto ranks = connect_all(2, small_ring());
  Pooled pooled(ramp(20 * kCount));
  Floats small(1), got(pooled.count);
  auto send = post(ranks[0], 1, pooled);
  post_send(ranks[0], 1, small, tagged(1))->wait(10s);  // behind it in the ring
  auto receive = post_receive(ranks[1], 0, got);
  ranks[0]->close();
  send->wait(10s);
  receive->wait(10s);
  CHECK(got == ramp(pooled.count));
}

TEST(pool_tensor_for_a_peer_that_closes_is_an_error) {
  auto ranks = connect_all(2, small_ring());
  Pooled pooled(ramp(kCount));
  auto send = post(ranks[0], 1, pooled);
  ranks[1]->close();
  CHECK_ERROR(ErrorKind::transport, "has left", send->wait(10s));
  CHECK(send->has_left());
}

TEST(strict_send_of_a_pool_tensor_is_done_only_when_its_receive_is_posted) {
  CommunicatorOptions options = small_ring();
  options.limits.is_strict = true;
  auto ranks = connect_all(2, options);
  Pooled pooled(ramp(kCount));
  Floats other(8);
  auto parks = post_receive(ranks[1], 0, other, tagged(9));  // what comes meanwhile is taken, and parked
  auto send = post(ranks[0], 1, pooled, tagged(1));
  post_send(ranks[0], 1, other, tagged(9));
  parks->wait(10s);
  CHECK(!send->is_done());
  CHECK(received(ranks[1], tagged(1)) == ramp(kCount));
  send->wait(10s);
  auto unfit = post(ranks[0], 1, pooled);
  CHECK_ERROR(ErrorKind::message_mismatch, "", received(ranks[1], {}, 7));
  CHECK_ERROR(ErrorKind::message_mismatch, "rank 1 refused", unfit->wait(10s));
}

TEST(one_pool_tensor_at_a_time_is_lent) {
  auto ranks = connect_all(2, small_ring());
  Pooled pooled(ramp(kCount));
  Floats small = ramp(8), got(8);
  auto first = post(ranks[0], 1, pooled), second = post(ranks[0], 1, pooled);
  CHECK_ERROR(ErrorKind::link_timeout, "", second->wait(50ms));
  CHECK(second->has_left() && !first->has_left());  // it had not begun
  post_send(ranks[0], 1, small);
  CHECK(received(ranks[1]) == ramp(kCount));
  post_receive(ranks[1], 0, got)->wait(10s);
  CHECK(got == small);
  first->wait(10s);
}

TEST(peer_lets_go_of_segments_that_were_trimmed) {
  auto ranks = connect_all(2, small_ring());
  std::optional<Pooled> pooled(ramp(3'000'000));
  auto send = post(ranks[0], 1, *pooled);
  CHECK(received(ranks[1], {}, 3'000'000) == ramp(3'000'000));
  send->wait(10s);
  CHECK(num_mapped_to_read() > 0);
  send.reset();
  pooled.reset();
  pool()->trim();
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (num_mapped_to_read() > 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  CHECK_EQ(num_mapped_to_read(), std::size_t{0});
}

TEST(block_of_moved_memory_is_found_piece_by_piece_while_the_pool_holds_it) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  const auto full = make_host_pool(16 * kMiB);
  Ends ends;
  std::vector<Block> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(allocate_block(full, kMiB));
  for (std::size_t i = 0; i < 16; i += 2) blocks[i].reset();
  Block moved = allocate_block(full, 8 * kMiB);
  CHECK(full->stats().num_remaps > 0);
  const std::byte* data = bytes_of(moved);
  const std::string text = random_text(moved.nbytes() - 1000);
  std::memcpy(static_cast<std::byte*>(moved.data()) + 500, text.data(), text.size());
  CHECK(ends.read(data + 500, text.size()) == text);
  CHECK_EQ(ends.offered.size(), std::size_t{1});
  moved.reset();
  blocks.clear();
  CHECK_EQ(full->trim(), 16 * kMiB);
  CHECK(!ends.writer.offer(data, 1));
  ends.writer.tell_gone();
  CHECK_EQ(ends.offered.size(), std::size_t{0});
}

TEST(what_no_pool_holds_is_not_offered) {
  Ends ends;
  Floats plain(100);
  CHECK(!ends.writer.offer(reinterpret_cast<const std::byte*>(plain.data()), 400));
  const std::byte* freed = nullptr;
  {
    const auto short_lived = make_host_pool(0);
    const Block block = allocate_block(short_lived, 1000);
    freed = bytes_of(block);
    CHECK(ends.writer.offer(freed, 1000));
    CHECK(!ends.writer.offer(freed, std::size_t{1} << 40));
  }
  CHECK(!ends.writer.offer(freed, 1000));
  ends.writer.tell_gone();
  CHECK(ends.offered.empty());
}

TEST(one_peer_is_offered_no_more_segments_than_it_keeps) {
  SegmentDirectory& directory = SegmentDirectory::instance();
  const Segment segment = Segment::create(page_nbytes());
  std::vector<std::byte> addresses(kMaxSourceSegments + 1);
  std::vector<std::uint64_t> ids;
  for (const std::byte& address : addresses) ids.push_back(directory.add(&address, 1, segment.fd()));
  Ends ends;
  CHECK(!ends.writer.offer(addresses.data(), addresses.size()));
  CHECK(ends.writer.offer(addresses.data(), addresses.size() - 1));
  CHECK_ERROR(ErrorKind::transport, "at most 256", ends.reader.add(ids.back(), dup(segment.fd())));
  CHECK_ERROR(ErrorKind::transport, "offered before", ends.reader.add(ids.front(), dup(segment.fd())));
  for (const std::uint64_t id : ids) directory.remove_segment(id);
}

TEST(damaged_notes_are_refused_and_never_followed) {
  const Segment segment = Segment::create(3 * page_nbytes());
  SourceReader reader;
  reader.add(1, dup(segment.fd()));
  std::mt19937_64 random(1);
  const auto number = [&] { return random() >> (random() % 64); };
  int num_found = 0;
  for (int i = 0; i < 200'000; ++i) {
    SourceNote note{random() % 3, number(), number()};
    std::byte record[sizeof(note) + 8] = {};
    std::memcpy(record, &note, sizeof(note));
    const std::uint64_t most = number();
    try {
      note = SourceReader::read_note({record, random() % 4 == 0 ? random() % sizeof(record) : sizeof(note)}, most);
      const std::byte* data = reader.find(note);
      CHECK(note.segment_id == 1 && note.nbytes > 0 && note.nbytes <= most && note.nbytes <= kSourceChunkNbytes);
      CHECK(note.offset + note.nbytes <= segment.nbytes());
      CHECK(data[0] == std::byte{0} && data[note.nbytes - 1] == std::byte{0});
      ++num_found;
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::transport);
    }
  }
  CHECK(num_found > 100);
}

TEST(peer_that_tells_of_what_is_not_there_is_lost_and_nothing_else) {
  const Segment sealed = Segment::create(page_nbytes());
  const int unsealed = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK_EQ(ftruncate(unsealed, 4 * kCount), 0);
  for (const int fd : {sealed.fd(), unsealed}) {
    auto ranks = connect_all(3, small_ring());
    Floats values = ramp(kCount), got(kCount);
    const auto* data = reinterpret_cast<const std::byte*>(values.data());
    const std::uint64_t id = SegmentDirectory::instance().add(data, 4 * kCount, fd);  // a lie
    auto send = post_send(ranks[0], 1, values);
    CHECK_ERROR(ErrorKind::peer_lost, fd == unsealed ? "sealed" : "inside a segment", received(ranks[1]));
    CHECK_ERROR(ErrorKind::peer_lost, "rank 1", send->wait(10s));
    SegmentDirectory::instance().remove_segment(id);
    post_send(ranks[2], 1, values);
    post_receive(ranks[1], 2, got)->wait(10s);
    CHECK(got == values);
  }
  close(unsealed);
}

TEST(reader_is_told_of_a_revocation_and_rung_for_the_position_that_was_wanted) {
  RingReader reader = RingReader::create(1 << 16);
  RingWriter writer(Segment::adopt(dup(reader.fd()), ring_segment_nbytes(1 << 16)));
  const auto write = [&] {
    CHECK(writer.reserve(100) != nullptr);
    writer.publish({100, 0, 0});
    return writer.published();
  };
  write();
  const std::uint64_t second = write(), third = write();
  writer.want_ring(second);
  writer.want_ring(third);
  const auto take = [&] { return reader.front().has_value() && reader.pop(); };
  CHECK(!take());
  CHECK(take());
  CHECK(!take());
  CHECK(!reader.is_revoked());
  writer.revoke();
  CHECK(reader.is_revoked());
}

CHECK_MAIN()
