// The bytes in front of every tensor on the wire, little endian. docs/wire_format.md draws them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/api.h"
#include "wire/chunks.h"
#include "wire/message.h"

namespace pipecomm {

inline constexpr std::uint16_t kWireVersion = 3;
inline constexpr std::size_t kFixedHeaderNbytes = 64;
inline constexpr std::size_t kOrderNbytes = 8;
inline constexpr std::size_t kMaxHeaderNbytes = kFixedHeaderNbytes + 8 * kMaxDims + kOrderNbytes;

struct MessageHeader {
  MessageKey key;
  CodecSpec codec;
  DType dtype = DType::uint8;
  bool requires_grad = false;
  bool absent = false;
  bool in_slots = false;   // records tell of slots on the receiver's device, where the tensor's bytes are
  bool at_source = false;  // records tell where in the sender's memory the tensor's bytes are (source.h)
  std::uint16_t part_index = 0;
  std::uint16_t num_parts = 1;
  std::uint64_t seq = 0;             // counts the headers of a channel from 0; a gap is an error
  std::uint64_t payload_nbytes = 0;  // of the tensor
  std::uint64_t wire_nbytes = 0;     // that follow the headers, in all chunks
  std::vector<std::int64_t> shape;
  DimOrder order;

  std::size_t nbytes() const { return kFixedHeaderNbytes + 8 * shape.size() + (order.empty() ? 0 : kOrderNbytes); }
};

// Writes header.nbytes() bytes.
PC_API void write_header(const MessageHeader& header, std::byte* out);
// Checks every field against the others and the checksum before it believes any; throws a transport error.
PC_API MessageHeader read_header(std::span<const std::byte> bytes);
// CRC-32C (Castagnoli), as in RFC 3720 appendix B.4.
PC_API std::uint32_t crc32c(std::span<const std::byte> bytes);

// Whether each of `num_dims` (at most 16) dimensions is in it once.
PC_API bool is_dim_order(const DimOrder& order, std::size_t num_dims);

// Bytes of a record that tells of a slot, after the header: the position of its end.
inline constexpr std::size_t kSlotNoteNbytes = 8;

// Wire bytes of one whole tensor, split into chunks of at most `chunk_nbytes`.
PC_API std::uint64_t chunked_wire_nbytes(const CodecSpec& codec, DType dtype, const std::vector<std::int64_t>& shape,
                                         std::size_t chunk_nbytes = kChunkNbytes);
// "float32 [4, 16]"
PC_API std::string describe_tensor(DType dtype, const std::vector<std::int64_t>& shape);

}  // namespace pipecomm
