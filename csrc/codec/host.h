// The host loops of one instruction set, and the choice among them.
#pragma once

#include <cstddef>
#include <vector>

#include "base/api.h"
#include "base/dtype.h"
#include "codec/codec_name.h"
#include "codec/layout.h"

namespace pipecomm {

// `src` and `dst` point at the tensor's first element, `wire` at the run's first byte.
struct HostLoops {
  const char* name;
  void (*encode)(const CodecSpec& spec, DType dtype, const RunLayout& layout, std::uint64_t sequence,
                 const std::byte* src, std::byte* wire);
  void (*decode)(const CodecSpec& spec, DType dtype, const RunLayout& layout, const std::byte* wire, std::byte* dst);
};

// Constant data: reading them runs no code of that instruction set.
extern const HostLoops kPortableLoops;
#if defined(__x86_64__)
extern const HostLoops kAvx2Loops;
extern const HostLoops kAvx512Loops;
#endif

// The loops that this processor and operating system can run, slowest first.
PC_API std::vector<const HostLoops*> usable_host_loops();

// The fastest of them, or the one the environment variable PIPECOMM_ISA names; chosen once.
// Throws a config error where that name is unknown or cannot run here.
PC_API const HostLoops& host_loops();

}  // namespace pipecomm
