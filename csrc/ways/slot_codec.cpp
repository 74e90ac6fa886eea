// Kernels on a CUDA stream, the host's loops on a host stream.
#include "ways/slot_codec.h"

#include "codec/codec.h"

#ifdef PIPECOMM_HAVE_CUDA
#include "codec/launch.h"
#endif

namespace pipecomm {

void encode_on(Stream& stream, const GroupRun& run, const void* src, void* wire, std::uint64_t sequence) {
#ifdef PIPECOMM_HAVE_CUDA
  const bool is_launched = stream.launch([&](void* native) {
    encode_cuda(run.codec, run.dtype, src, run.grid, run.begin, run.end, wire, native, sequence);
  });
  if (is_launched) return;
#endif
  stream.enqueue([=] { encode(run.codec, run.dtype, src, run.grid, run.begin, run.end, wire, sequence); });
}

void decode_on(Stream& stream, const GroupRun& run, const void* wire, void* dst) {
#ifdef PIPECOMM_HAVE_CUDA
  const bool is_launched = stream.launch(
      [&](void* native) { decode_cuda(run.codec, run.dtype, wire, run.grid, run.begin, run.end, dst, native); });
  if (is_launched) return;
#endif
  stream.enqueue([=] { decode(run.codec, run.dtype, wire, run.grid, run.begin, run.end, dst); });
}

void load_kernels(Stream& stream) {
#ifdef PIPECOMM_HAVE_CUDA
  stream.launch([](void*) {
    load_encode_kernels();
    load_decode_kernels();
  });
#else
  static_cast<void>(stream);
#endif
}

}  // namespace pipecomm
