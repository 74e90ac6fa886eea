// Launches the encode kernel for a codec, dtype and group size.
#include "codec/encode_kernel.cuh"
#include "codec/host.h"
#include "codec/launch.h"
#include "codec/launch_check.h"

namespace pipecomm {

void encode_cuda(const CodecSpec& spec, DType dtype, const void* src, const Grid& grid, std::int64_t group_begin,
                 std::int64_t group_end, void* wire, void* stream, std::uint64_t sequence) {
  const RunLayout run = run_layout(spec, grid, group_begin, group_end);
  if (run.num_groups == 0) return;
  const KernelNoise noise{{spec.seed, sequence}, spec.rounding == Rounding::stochastic};
  dispatch_float(dtype, [&](auto value) {
    using T = decltype(value);
    choose_kernel(spec.id, run, [&](auto rule, auto group_size, auto unit_size, auto has_spikes) {
      launch("the encode kernel", encode_kernel<T, decltype(rule), group_size(), unit_size(), has_spikes()>, run,
             stream, run, noise, static_cast<const T*>(src), static_cast<unsigned char*>(wire));
    });
  });
}

void load_encode_kernels() {
  for_each_kernel([](auto value, auto rule, auto group_size, auto unit_size, auto has_spikes) {
    load(encode_kernel<decltype(value), decltype(rule), group_size(), unit_size(), has_spikes()>);
  });
}

}  // namespace pipecomm
