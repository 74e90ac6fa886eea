// The checks of a caller's arguments.
#include "transport/group/checks.h"

#include "base/error.h"
#include "wire/header.h"

namespace pipecomm {

void check_peer(int peer, int rank, std::size_t size, const std::string& what, const std::string& where) {
  if (peer < 0 || peer >= static_cast<int>(size)) {
    throw Error(ErrorKind::config, "expected to " + what + " a rank from 0 to " + std::to_string(size - 1) + "; got " +
                                       std::to_string(peer) + where);
  }
  if (peer == rank) {
    throw Error(ErrorKind::config,
                "expected to " + what + " another rank; got this rank, " + std::to_string(rank) + where);
  }
}

void check_part(const SendPart& part, const std::string& where) {
  if (part.tensor.shape.size() > static_cast<std::size_t>(kMaxDims)) {
    throw Error(ErrorKind::tensor,
                "expected a tensor of at most 16 dimensions; got " + std::to_string(part.tensor.shape.size()) + where);
  }
  if (!part.tensor.order.empty() && !is_dim_order(part.tensor.order, part.tensor.shape.size())) {
    throw Error(ErrorKind::tensor, "expected every dimension once in the order of memory; got " +
                                       std::to_string(part.tensor.order.size()) + " places for " +
                                       std::to_string(part.tensor.shape.size()) + " dimensions" + where);
  }
  if (!carries(part.codec, part.tensor.dtype)) {
    throw Error(ErrorKind::tensor, "expected float32, bfloat16 or float16 for codec " + codec_to_string(part.codec) +
                                       "; got " + dtype_name(part.tensor.dtype) + where);
  }
}

}  // namespace pipecomm
