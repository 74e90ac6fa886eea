// Encoding into slots and decoding out of them, in the order of a stream of the device.
#pragma once

#include "base/dtype.h"
#include "codec/runs.h"
#include "device/stream.h"

namespace pipecomm {

// Part of a tensor, as in codec.h.
struct GroupRun {
  CodecSpec codec;
  DType dtype;
  Grid grid;
  std::int64_t begin;
  std::int64_t end;
};

void encode_on(Stream& stream, const GroupRun& run, const void* src, void* wire, std::uint64_t sequence);
void decode_on(Stream& stream, const GroupRun& run, const void* wire, void* dst);

// Loads the kernels of the stream's device, so that no launch has to wait for what is enqueued. Throws a cuda error.
void load_kernels(Stream& stream);

}  // namespace pipecomm
