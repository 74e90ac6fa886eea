// The bytes in front of a message, and the ring that carries them.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "ways/ring.h"
#include "wire/header.h"

using namespace pipecomm;

namespace {

MessageHeader sample_header() {
  MessageHeader header;
  header.key = {-7, Direction::backward, 3, 9, 5};
  header.dtype = DType::float32;
  header.shape = {2, 0, 5};
  header.requires_grad = true;
  header.part_index = 1;
  header.num_parts = 3;
  header.seq = 41;
  return header;
}

std::vector<std::byte> bytes_of(const MessageHeader& header) {
  std::vector<std::byte> bytes(header.nbytes());
  write_header(header, bytes.data());
  return bytes;
}

std::span<const std::byte> as_bytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// A ring in this process: the writer maps the reader's descriptor a second time.
struct RingPair {
  explicit RingPair(std::size_t capacity) : reader(RingReader::create(capacity)), writer(map(reader, capacity)) {}
  static RingWriter map(const RingReader& reader, std::size_t capacity) {
    return RingWriter(Segment::adopt(::dup(reader.fd()), ring_segment_nbytes(capacity)));
  }
  bool write(const std::string& text) {
    std::byte* out = writer.reserve(text.size());
    if (out == nullptr) return false;
    std::memcpy(out, text.data(), text.size());
    writer.publish({static_cast<std::uint32_t>(text.size()), 1, 2});
    return true;
  }
  std::optional<std::string> read() {
    const auto record = reader.front();
    if (!record) return std::nullopt;
    std::string text(reinterpret_cast<const char*>(record->data), record->info.nbytes);
    reader.pop();
    return text;
  }
  RingReader reader;
  RingWriter writer;
};

}  // namespace

TEST(directions_are_read_by_the_names_they_are_written_with) {
  for (const Direction direction : {Direction::none, Direction::forward, Direction::backward}) {
    CHECK(direction_from_name(direction_name(direction)) == direction);
  }
  CHECK_EQ(std::string(direction_name(Direction::backward)), std::string("backward"));
  CHECK_ERROR(ErrorKind::config, "got 'sideways'", direction_from_name("sideways"));
}

TEST(checksum_of_the_standard_text_is_the_standard_value) { CHECK_EQ(crc32c(as_bytes("123456789")), 0xe3069283u); }

TEST(header_written_and_read_is_the_same) {
  const MessageHeader header = sample_header();
  const MessageHeader got = read_header(bytes_of(header));
  CHECK(got.key == header.key);
  CHECK(got.shape == header.shape);
  CHECK(got.dtype == header.dtype);
  CHECK(got.requires_grad && !got.absent);
  CHECK_EQ(got.part_index, header.part_index);
  CHECK_EQ(got.num_parts, header.num_parts);
  CHECK_EQ(got.seq, header.seq);
}

TEST(header_has_64_bytes_and_8_per_dimension) {
  MessageHeader header = sample_header();
  CHECK_EQ(bytes_of(header).size(), std::size_t{64 + 3 * 8});
  header.shape.clear();
  header.payload_nbytes = header.wire_nbytes = 4;
  CHECK_EQ(bytes_of(header).size(), std::size_t{64});
}

TEST(header_bytes_are_the_golden_ones) {
  const std::vector<std::byte> bytes = bytes_of(sample_header());
  const std::array<unsigned char, 28> expected = {'P', 'C', 'M', '1', 3, 0, 88, 0, 0, 8, 3, 2, 0, 0,
                                                  1,   0,   1,   0,   3, 0, 3,  0, 0, 0, 9, 0, 0, 0};
  CHECK(std::memcmp(bytes.data(), expected.data(), expected.size()) == 0);
  const std::array<unsigned char, 8> tag_and_stage = {0xf9, 0xff, 0xff, 0xff, 5, 0, 0, 0};
  CHECK(std::memcmp(bytes.data() + 32, tag_and_stage.data(), tag_and_stage.size()) == 0);
}

TEST(stage_that_cannot_be_is_refused) {
  MessageHeader header = sample_header();
  header.key.stage = -2;
  CHECK_ERROR(ErrorKind::transport, "a stage, or none; got -2", read_header(bytes_of(header)));
}

TEST(order_of_dimensions_follows_the_shape_in_8_bytes) {
  MessageHeader header = sample_header();
  header.order = {0, 2, 1};
  const std::vector<std::byte> bytes = bytes_of(header);
  CHECK_EQ(bytes.size(), std::size_t{64 + 3 * 8 + 8});
  CHECK(bytes[6] == std::byte{96} && bytes[14] == std::byte{17});  // its length; the flag beside that of the gradient
  const std::array<unsigned char, 8> expected = {0x20, 0x01, 0, 0, 0, 0, 0, 0};
  CHECK(std::memcmp(bytes.data() + 88, expected.data(), expected.size()) == 0);
  CHECK(read_header(bytes).order == header.order);
  CHECK(read_header(bytes_of(sample_header())).order.empty());
}

TEST(order_of_16_dimensions_written_and_read_is_the_same) {
  MessageHeader header = sample_header();
  header.shape.assign(16, 1);
  header.shape[7] = 0;
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    header.order.resize(16);
    std::iota(header.order.begin(), header.order.end(), std::uint8_t{0});
    std::shuffle(header.order.begin(), header.order.end(), random);
    CHECK(read_header(bytes_of(header)).order == header.order);
  }
}

TEST(order_that_is_none_of_the_dimensions_is_refused) {
  MessageHeader header = sample_header();
  for (const DimOrder& order : {DimOrder{0, 1, 1}, DimOrder{0, 1, 3}, DimOrder{0, 1, 15}, DimOrder{0, 1},
                                DimOrder{0, 1, 2, 3}, DimOrder{0, 0, 0}}) {
    header.order = order;
    CHECK_ERROR(ErrorKind::transport, "every dimension once", read_header(bytes_of(header)));
  }
}

TEST(order_in_a_header_without_room_for_it_is_refused) {
  MessageHeader header = sample_header();
  header.order = {0, 2, 1};
  std::vector<std::byte> bytes = bytes_of(header);
  CHECK_ERROR(ErrorKind::transport, "header length", read_header({bytes.data(), 88}));
  bytes[14] = std::byte{1};
  CHECK_ERROR(ErrorKind::transport, "header length", read_header(bytes));
}

TEST(header_with_any_bit_flipped_is_refused) {
  const std::vector<std::byte> good = bytes_of(sample_header());
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::vector<std::byte> bad = good;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    CHECK_ERROR(ErrorKind::transport, "refused", read_header(bad));
  }
}

TEST(header_cut_short_is_refused) {
  const std::vector<std::byte> good = bytes_of(sample_header());
  for (std::size_t length = 0; length < good.size(); ++length) {
    CHECK_ERROR(ErrorKind::transport, "refused", read_header({good.data(), length}));
  }
}

TEST(random_bytes_are_refused_without_a_crash) {
  std::mt19937_64 random(1);
  std::array<std::byte, 256> bytes;
  for (int round = 0; round < 20000; ++round) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    // A good start lets the later checks see nonsense too.
    if (round % 2 == 0)
      std::memcpy(bytes.data(), bytes_of(sample_header()).data(), 1 + static_cast<std::size_t>(random() % 32));
    CHECK_ERROR(ErrorKind::transport, "refused", read_header(bytes));
  }
}

TEST(header_whose_sizes_do_not_fit_its_shape_is_refused) {
  MessageHeader header = sample_header();
  header.shape = {2, 3};
  header.payload_nbytes = 23;
  header.wire_nbytes = 24;
  CHECK_ERROR(ErrorKind::transport, "payload bytes", read_header(bytes_of(header)));
  header.payload_nbytes = 24;
  header.wire_nbytes = 25;
  CHECK_ERROR(ErrorKind::transport, "wire bytes", read_header(bytes_of(header)));
}

TEST(header_with_extents_beyond_any_machine_is_refused) {
  MessageHeader header = sample_header();
  header.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40};
  CHECK_ERROR(ErrorKind::transport, "2^42", read_header(bytes_of(header)));
  header.shape = {-1, 4};
  CHECK_ERROR(ErrorKind::transport, "0 or more", read_header(bytes_of(header)));
}

TEST(quantizing_codec_for_integers_is_refused) {
  MessageHeader header = sample_header();
  header.shape = {0};
  header.dtype = DType::int64;
  header.codec = parse_codec("int8");
  CHECK_ERROR(ErrorKind::transport, "float dtype", read_header(bytes_of(header)));
}

TEST(chunks_lie_end_to_end_and_add_up_to_the_wire_bytes_of_the_tensor) {
  const CodecSpec codec = parse_codec("int4:hadamard=64");
  const std::vector<std::int64_t> shape{3, 129, 1000};
  ChunkCursor cursor(codec, shape, 3 * 129 * 1000 * 4, 1000);
  std::uint64_t total = 0;
  while (!cursor.is_at_end()) {
    const Chunk chunk = cursor.front(1);
    CHECK_EQ(chunk.begin, cursor.position());
    CHECK(chunk.nbytes > 0 && chunk.nbytes <= 1000);
    total += chunk.nbytes;
    cursor.pass(chunk);
  }
  CHECK_EQ(total, chunked_wire_nbytes(codec, DType::float32, shape, 1000));
  CHECK_EQ(cursor.front(1).nbytes, 0u);
}

TEST(chunks_of_a_raw_tensor_are_as_long_as_asked_for_and_end_with_it) {
  ChunkCursor cursor({}, {7}, 28, kChunkNbytes);
  CHECK_EQ(cursor.front(20).nbytes, 20u);
  cursor.pass(cursor.front(20));
  CHECK_EQ(cursor.front(20).nbytes, 8u);
  CHECK_EQ(ChunkCursor({}, {0, 7}, 0, kChunkNbytes).front(20).nbytes, 0u);
}

TEST(group_that_fits_no_chunk_is_refused) {
  const ChunkCursor cursor(parse_codec("int8:group=128"), {128}, 512, 16);
  CHECK_ERROR(ErrorKind::transport, "groups that fit a chunk", cursor.front(0));
}

TEST(grid_of_a_shape_keeps_its_last_dimension) {
  CHECK_EQ(grid_of({}).rows * grid_of({}).cols, 1);
  CHECK_EQ(grid_of({7}).cols, 7);
  CHECK_EQ(grid_of({2, 3, 5}).rows, 6);
}

TEST(ring_gives_records_back_in_order_across_its_end) {
  RingPair ring(4096);
  std::mt19937 random(2);
  for (int round = 0; round < 5000; ++round) {
    const std::string text(random() % 700, static_cast<char>('a' + round % 26));
    CHECK(ring.write(text));
    CHECK(ring.read() == text);
  }
  CHECK(!ring.read());
}

TEST(ring_without_room_refuses_until_a_record_is_popped) {
  RingPair ring(4096);
  int num_written = 0;
  while (ring.write(std::string(500, 'x'))) ++num_written;
  CHECK(num_written >= 6);
  CHECK(ring.reader.front().has_value());
  CHECK(ring.reader.pop());  // the writer waits: wake it
  CHECK(ring.write(std::string(500, 'y')));
}

TEST(ring_keeps_empty_records_and_times) {
  RingPair ring(4096);
  CHECK(ring.write(""));
  const auto record = ring.reader.front();
  CHECK(record.has_value());
  CHECK_EQ(record->info.nbytes, 0u);
  CHECK_EQ(record->info.sent_ns, 1);
  CHECK_EQ(record->info.ready_ns, 2);
}

TEST(ring_record_longer_than_the_ring_is_refused) {
  RingPair ring(4096);
  CHECK(ring.write("abc"));
  const std::uint32_t nonsense = 1u << 20;
  Segment alias = Segment::adopt(::dup(ring.reader.fd()), ring_segment_nbytes(4096));
  std::memcpy(alias.data() + 4096, &nonsense, sizeof(nonsense));
  CHECK_ERROR(ErrorKind::transport, "inside the ring", ring.reader.front());
}

TEST(segment_of_another_size_is_not_taken_for_a_ring) {
  Segment segment = Segment::create(4096);
  CHECK_ERROR(ErrorKind::transport, "ring segment", RingWriter(Segment::adopt(::dup(segment.fd()), 4096)));
}

TEST(ring_between_two_threads_loses_nothing) {
  RingPair ring(8192);
  constexpr int kRounds = 20000;
  std::thread writer([&] {
    for (int round = 0; round < kRounds; ++round) {
      const std::string text(static_cast<std::size_t>(round % 300), static_cast<char>(round % 100));
      while (!ring.write(text)) std::this_thread::yield();
    }
  });
  int num_wrong = 0;
  for (int round = 0; round < kRounds;) {
    const auto text = ring.read();
    if (!text) {
      std::this_thread::yield();
      continue;
    }
    if (*text != std::string(static_cast<std::size_t>(round % 300), static_cast<char>(round % 100))) ++num_wrong;
    ++round;
  }
  writer.join();
  CHECK_EQ(num_wrong, 0);
}

CHECK_MAIN()
