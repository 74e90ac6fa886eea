// Header fields to bytes and back, with the checks that make bytes from elsewhere safe to use.
#include "wire/header.h"

#include <array>
#include <bit>
#include <cstring>

namespace pipecomm {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire format is written by copying little-endian fields");

constexpr std::uint32_t kMagic = 0x314d4350;  // "PCM1"
constexpr std::uint16_t kRequiresGrad = 1;
constexpr std::uint16_t kAbsent = 2;
constexpr std::uint16_t kInSlots = 4;
constexpr std::uint16_t kAtSource = 8;
constexpr std::uint16_t kOrdered = 16;
constexpr std::uint64_t kMaxTensorNbytes = std::uint64_t{1} << 42;

struct FixedHeader {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t header_nbytes;
  std::uint8_t codec;
  std::uint8_t dtype;
  std::uint8_t ndim;
  std::uint8_t direction;
  std::uint16_t group_size;
  std::uint16_t flags;
  std::uint16_t part_index;
  std::uint16_t num_parts;
  std::int32_t microbatch;
  std::uint32_t epoch;
  std::uint32_t checksum;  // CRC-32C of the whole header with this field 0
  std::int32_t tag;
  std::int32_t stage;
  std::uint64_t seq;
  std::uint64_t payload_nbytes;
  std::uint64_t wire_nbytes;
};
static_assert(sizeof(FixedHeader) == kFixedHeaderNbytes);

// tables[k][b]: what byte b does to the sum with k more bytes behind it; eight bytes are then summed at once.
using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1u) ? 0x82f63b78u : 0u);
    tables[0][i] = value;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t i = 0; i < 256; ++i) {
      const std::uint32_t value = tables[k - 1][i];
      tables[k][i] = (value >> 8) ^ tables[0][value & 0xffu];
    }
  }
  return tables;
}

[[noreturn]] void refuse(const std::string& expected) {
  throw Error(ErrorKind::transport, "message header refused: expected " + expected);
}

// The text is put together only when it is needed: this runs many times for every message.
template <typename... Got>
void require(bool holds, const char* expected, const Got&... got) {
  if (!holds) refuse((std::string(expected) + ... + std::to_string(got)));
}

// Product of the extents times the element size, refused when negative or beyond any machine.
std::uint64_t checked_nbytes(DType dtype, const std::vector<std::int64_t>& shape) {
  std::uint64_t nbytes = dtype_nbytes(dtype);
  bool is_empty = false;
  for (const std::int64_t extent : shape) {
    require(extent >= 0, "extents of 0 or more; got ", extent);
    if (extent == 0) is_empty = true;
    const auto factor = static_cast<std::uint64_t>(extent == 0 ? 1 : extent);
    if (nbytes > kMaxTensorNbytes / factor)
      refuse("a tensor of at most 2^42 bytes; got " + describe_tensor(dtype, shape));
    nbytes *= factor;
  }
  return is_empty ? 0 : nbytes;
}

// Four bits for each place in memory, the outermost in the lowest.
std::uint64_t pack_order(const DimOrder& order) {
  std::uint64_t word = 0;
  for (std::size_t place = 0; place < order.size(); ++place) word |= std::uint64_t{order[place]} << (4 * place);
  return word;
}

DimOrder unpack_order(std::uint64_t word, std::size_t num_dims) {
  DimOrder order;
  for (std::size_t place = 0; place < num_dims; ++place) order.push_back((word >> (4 * place)) & 15u);
  require(is_dim_order(order, num_dims) && pack_order(order) == word, "every dimension once in the order; got ", word);
  return order;
}

void check_fixed(const FixedHeader& fixed, std::size_t available) {
  require(fixed.magic == kMagic, "the magic number PCM1; got ", fixed.magic);
  require(fixed.version == kWireVersion, "the wire version of this build; got ", fixed.version);
  require(fixed.ndim <= kMaxDims, "at most 16 dimensions; got ", fixed.ndim);
  const std::size_t order_nbytes = (fixed.flags & kOrdered) != 0 ? kOrderNbytes : 0;
  require(
      fixed.header_nbytes == kFixedHeaderNbytes + 8u * fixed.ndim + order_nbytes && fixed.header_nbytes <= available,
      "a header length that fits its record; got ", fixed.header_nbytes);
  require(is_known_dtype(fixed.dtype), "a known dtype; got ", fixed.dtype);
  require(codec_from_wire(fixed.codec, fixed.group_size).has_value(), "a known codec; got ", fixed.codec);
  require(fixed.direction <= static_cast<std::uint8_t>(Direction::backward), "a known direction; got ",
          fixed.direction);
  require(fixed.stage >= kNoStage, "a stage, or none; got ", fixed.stage);
  require(fixed.num_parts > 0 && fixed.part_index < fixed.num_parts, "a part index below the number of parts");
}

}  // namespace

std::uint32_t crc32c(std::span<const std::byte> bytes) {
  static constexpr CrcTables kTables = make_crc_tables();
  std::uint32_t crc = ~0u;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof(word));
    word ^= crc;
    crc = 0;
    for (std::size_t i = 0; i < 8; ++i) crc ^= kTables[7 - i][(word >> (8 * i)) & 0xffu];
  }
  for (const std::byte byte : bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<std::uint32_t>(byte)) & 0xffu];
  return ~crc;
}

void write_header(const MessageHeader& header, std::byte* out) {
  FixedHeader fixed{};
  fixed.magic = kMagic;
  fixed.version = kWireVersion;
  fixed.header_nbytes = static_cast<std::uint16_t>(header.nbytes());
  fixed.codec = wire_id(header.codec);
  fixed.dtype = static_cast<std::uint8_t>(header.dtype);
  fixed.ndim = static_cast<std::uint8_t>(header.shape.size());
  fixed.direction = static_cast<std::uint8_t>(header.key.direction);
  fixed.group_size = header.codec.group_size;
  fixed.flags = static_cast<std::uint16_t>((header.requires_grad ? kRequiresGrad : 0) | (header.absent ? kAbsent : 0) |
                                           (header.in_slots ? kInSlots : 0) | (header.at_source ? kAtSource : 0) |
                                           (header.order.empty() ? 0 : kOrdered));
  fixed.part_index = header.part_index;
  fixed.num_parts = header.num_parts;
  fixed.microbatch = header.key.microbatch;
  fixed.epoch = header.key.epoch;
  fixed.tag = header.key.tag;
  fixed.stage = header.key.stage;
  fixed.seq = header.seq;
  fixed.payload_nbytes = header.payload_nbytes;
  fixed.wire_nbytes = header.wire_nbytes;
  std::memcpy(out, &fixed, sizeof(fixed));
  if (!header.shape.empty()) std::memcpy(out + sizeof(fixed), header.shape.data(), 8 * header.shape.size());
  const std::uint64_t order = pack_order(header.order);
  if (!header.order.empty()) std::memcpy(out + sizeof(fixed) + 8 * header.shape.size(), &order, sizeof(order));
  fixed.checksum = crc32c({out, header.nbytes()});
  std::memcpy(out + offsetof(FixedHeader, checksum), &fixed.checksum, sizeof(fixed.checksum));
}

MessageHeader read_header(std::span<const std::byte> bytes) {
  require(bytes.size() >= kFixedHeaderNbytes, "at least 64 bytes; got ", bytes.size());
  FixedHeader fixed;
  std::memcpy(&fixed, bytes.data(), sizeof(fixed));
  check_fixed(fixed, bytes.size());
  std::array<std::byte, kMaxHeaderNbytes> copy{};
  std::memcpy(copy.data(), bytes.data(), fixed.header_nbytes);
  std::memset(copy.data() + offsetof(FixedHeader, checksum), 0, sizeof(fixed.checksum));
  require(crc32c({copy.data(), fixed.header_nbytes}) == fixed.checksum, "a matching checksum");

  MessageHeader header;
  header.key = {fixed.tag, static_cast<Direction>(fixed.direction), fixed.microbatch, fixed.epoch, fixed.stage};
  header.codec = *codec_from_wire(fixed.codec, fixed.group_size);
  header.dtype = static_cast<DType>(fixed.dtype);
  header.requires_grad = (fixed.flags & kRequiresGrad) != 0;
  header.absent = (fixed.flags & kAbsent) != 0;
  header.in_slots = (fixed.flags & kInSlots) != 0;
  header.at_source = (fixed.flags & kAtSource) != 0;
  header.part_index = fixed.part_index;
  header.num_parts = fixed.num_parts;
  header.seq = fixed.seq;
  header.shape.resize(fixed.ndim);
  if (fixed.ndim > 0) std::memcpy(header.shape.data(), copy.data() + sizeof(fixed), 8u * fixed.ndim);
  std::uint64_t order = 0;
  std::memcpy(&order, copy.data() + sizeof(fixed) + 8u * fixed.ndim, sizeof(order));
  if ((fixed.flags & kOrdered) != 0) header.order = unpack_order(order, fixed.ndim);
  header.payload_nbytes = header.absent ? 0 : checked_nbytes(header.dtype, header.shape);
  require(header.payload_nbytes == fixed.payload_nbytes, "payload bytes that fit the shape");
  require(carries(header.codec, header.dtype), "a float dtype for a quantizing codec");
  require(!header.at_source || (header.codec.is_raw() && !header.in_slots && header.payload_nbytes > 0),
          "bytes of a raw tensor at their source");
  const std::size_t chunk_nbytes = header.in_slots ? kDeviceChunkNbytes : kChunkNbytes;
  header.wire_nbytes = header.absent ? 0 : chunked_wire_nbytes(header.codec, header.dtype, header.shape, chunk_nbytes);
  require(header.wire_nbytes == fixed.wire_nbytes, "wire bytes that fit codec and shape");
  return header;
}

bool is_dim_order(const DimOrder& order, std::size_t num_dims) {
  std::uint32_t seen = 0;
  for (const std::uint8_t dim : order) {
    if (dim < num_dims) seen |= 1u << dim;
  }
  return order.size() == num_dims && seen + 1 == 1u << num_dims;
}

std::uint64_t chunked_wire_nbytes(const CodecSpec& codec, DType dtype, const std::vector<std::int64_t>& shape,
                                  std::size_t chunk_nbytes) {
  const std::uint64_t payload_nbytes = checked_nbytes(dtype, shape);
  if (codec.is_raw() || payload_nbytes == 0) return payload_nbytes;
  ChunkCursor cursor(codec, shape, payload_nbytes, chunk_nbytes);
  std::uint64_t total = 0;
  while (!cursor.is_at_end()) {
    const Chunk chunk = cursor.front(0);
    total += chunk.nbytes;
    cursor.pass(chunk);
  }
  return total;
}

std::string describe_tensor(DType dtype, const std::vector<std::int64_t>& shape) {
  std::string text = std::string(dtype_name(dtype)) + " [";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace pipecomm
