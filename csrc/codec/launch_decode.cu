// Launches the decode kernel for a codec, dtype and group size.
#include "codec/decode_kernel.cuh"
#include "codec/host.h"
#include "codec/launch.h"
#include "codec/launch_check.h"

namespace pipecomm {

void decode_cuda(const CodecSpec& spec, DType dtype, const void* wire, const Grid& grid, std::int64_t group_begin,
                 std::int64_t group_end, void* dst, void* stream) {
  const RunLayout run = run_layout(spec, grid, group_begin, group_end);
  if (run.num_groups == 0) return;
  dispatch_float(dtype, [&](auto value) {
    using T = decltype(value);
    choose_kernel(spec.id, run, [&](auto rule, auto group_size, auto unit_size, auto has_spikes) {
      launch("the decode kernel", decode_kernel<T, decltype(rule), group_size(), unit_size(), has_spikes()>, run,
             stream, run, static_cast<const unsigned char*>(wire), static_cast<T*>(dst));
    });
  });
}

void load_decode_kernels() {
  for_each_kernel([](auto value, auto rule, auto group_size, auto unit_size, auto has_spikes) {
    load(decode_kernel<decltype(value), decltype(rule), group_size(), unit_size(), has_spikes()>);
  });
}

}  // namespace pipecomm
