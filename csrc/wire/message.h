// What a message is to those who send and receive it: a key to match by and tensors to carry.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/api.h"
#include "base/dtype.h"
#include "codec/codec_name.h"
#include "memory/block.h"

namespace pipecomm {

enum class Direction : std::uint8_t { none = 0, forward = 1, backward = 2 };

// "none", "forward", "backward".
PC_API const char* direction_name(Direction direction);
// Inverse of direction_name; throws a config error for any other text.
PC_API Direction direction_from_name(const std::string& name);

inline constexpr int kAnySource = -1;
inline constexpr std::int32_t kNoMicrobatch = -1;
inline constexpr std::int32_t kNoStage = -1;
inline constexpr int kMaxDims = 16;

// Messages match by source and key, and those of one key in the order they were sent. `stage` is the stage that takes
// the message: two ranks may share several boundaries. A lower epoch than the receiver's current one belongs to a
// section that was given up: it is dropped on arrival.
struct MessageKey {
  std::int32_t tag = 0;
  Direction direction = Direction::none;
  std::int32_t microbatch = kNoMicrobatch;
  std::uint32_t epoch = 0;
  std::int32_t stage = kNoStage;

  bool operator==(const MessageKey&) const = default;
};

// Where a tensor lies: on the host, or on the device with that index.
inline constexpr int kOnHost = -1;

// Dimensions by their place in memory, outermost first: {0, 2, 3, 1} for channels-last. Empty: row-major.
using DimOrder = std::vector<std::uint8_t>;

// A tensor in memory that somebody else owns. Its elements lie there without gaps: a raw one's by `order`, any other's
// row-major, and `order` then only tells how its receiver is to lay it out.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::uint8;
  std::vector<std::int64_t> shape;
  int device = kOnHost;
  DimOrder order = {};

  std::int64_t numel() const {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    return count;
  }
  std::size_t nbytes() const { return static_cast<std::size_t>(numel()) * dtype_nbytes(dtype); }
};

// One tensor of an outgoing message.
struct SendPart {
  TensorView tensor;
  CodecSpec codec;
  // The sender wants a gradient back for this tensor.
  bool requires_grad = false;
  // There is no tensor: a placeholder for a gradient that does not exist.
  bool absent = false;
};

// One tensor of an incoming message. `block` owns the memory when the receiver gave no target: the elements of a raw
// one lie in it by `order`, those of any other row-major.
struct ReceivedPart {
  Block block;
  DType dtype = DType::uint8;
  std::vector<std::int64_t> shape;
  DimOrder order = {};
  bool is_raw = true;
  bool requires_grad = false;
  bool absent = false;
  int device = kOnHost;  // where `block` lies
};

}  // namespace pipecomm
