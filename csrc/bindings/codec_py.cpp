// Codec functions of _core: names, sizes, encode and decode of whole tensors given as addresses.
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "codec/codec.h"
#include "codec/host.h"
#include "codec/layout.h"
#include "python/gil.h"
#if defined(PIPECOMM_HAVE_CUDA)
#include "codec/launch.h"
#endif

namespace py = pybind11;

namespace pipecomm {
namespace {

// Stochastic rounding takes this seed in place of the codec's own.
using Seed = std::optional<std::uint64_t>;

struct Call {
  CodecSpec spec;
  DType dtype;
  Grid grid;
  std::int64_t num_groups;
};

Call make_call(const std::string& codec, const std::string& dtype, std::int64_t rows, std::int64_t cols,
               Seed seed = {}) {
  CodecSpec spec = parse_codec(codec);
  spec.seed = seed.value_or(spec.seed);
  const Grid grid{rows, cols};
  return {spec, dtype_from_name(dtype), grid, num_groups(spec, grid)};
}

void encode_whole(const std::string& codec, const std::string& dtype, std::uintptr_t src, std::int64_t rows,
                  std::int64_t cols, std::uintptr_t wire, Seed seed) {
  const Call call = make_call(codec, dtype, rows, cols, seed);
  without_gil([&] {
    encode(call.spec, call.dtype, reinterpret_cast<const void*>(src), call.grid, 0, call.num_groups,
           reinterpret_cast<void*>(wire));
  });
}

void decode_whole(const std::string& codec, const std::string& dtype, std::uintptr_t wire, std::int64_t rows,
                  std::int64_t cols, std::uintptr_t dst) {
  const Call call = make_call(codec, dtype, rows, cols);
  without_gil([&] {
    decode(call.spec, call.dtype, reinterpret_cast<const void*>(wire), call.grid, 0, call.num_groups,
           reinterpret_cast<void*>(dst));
  });
}

#if defined(PIPECOMM_HAVE_CUDA)
void encode_whole_cuda(const std::string& codec, const std::string& dtype, std::uintptr_t src, std::int64_t rows,
                       std::int64_t cols, std::uintptr_t wire, std::uintptr_t stream, Seed seed) {
  const Call call = make_call(codec, dtype, rows, cols, seed);
  without_gil([&] {
    encode_cuda(call.spec, call.dtype, reinterpret_cast<const void*>(src), call.grid, 0, call.num_groups,
                reinterpret_cast<void*>(wire), reinterpret_cast<void*>(stream));
  });
}

void decode_whole_cuda(const std::string& codec, const std::string& dtype, std::uintptr_t wire, std::int64_t rows,
                       std::int64_t cols, std::uintptr_t dst, std::uintptr_t stream) {
  const Call call = make_call(codec, dtype, rows, cols);
  without_gil([&] {
    decode_cuda(call.spec, call.dtype, reinterpret_cast<const void*>(wire), call.grid, 0, call.num_groups,
                reinterpret_cast<void*>(dst), reinterpret_cast<void*>(stream));
  });
}
#endif

std::vector<std::string> usable_isas() {
  std::vector<std::string> names;
  for (const HostLoops* loops : usable_host_loops()) names.emplace_back(loops->name);
  return names;
}

}  // namespace

void register_codec(py::module_& module) {
  module.def("codec_name", [](const std::string& text) { return codec_to_string(parse_codec(text)); }, py::arg("text"));
  module.def(
      "codec_wire_nbytes",
      [](const std::string& codec, std::int64_t rows, std::int64_t cols) {
        const CodecSpec spec = parse_codec(codec);
        const Grid grid{rows, cols};
        return wire_nbytes(spec, grid, 0, num_groups(spec, grid));
      },
      py::arg("codec"), py::arg("rows"), py::arg("cols"));
  module.def(
      "codec_group_sizes",
      [](const std::string& codec) {
        const GroupSizes sizes = group_sizes(parse_codec(codec));
        return py::make_tuple(sizes.num_values, sizes.code_bits, sizes.section_nbytes, kSectionAlignment);
      },
      py::arg("codec"),
      "(values of a group, bits of a code, bytes of a group in each section before the codes, what sections are "
      "padded to)");
  module.def("codec_encode", &encode_whole, py::arg("codec"), py::arg("dtype"), py::arg("src"), py::arg("rows"),
             py::arg("cols"), py::arg("wire"), py::arg("seed") = py::none());
  module.def("codec_decode", &decode_whole, py::arg("codec"), py::arg("dtype"), py::arg("wire"), py::arg("rows"),
             py::arg("cols"), py::arg("dst"));
#if defined(PIPECOMM_HAVE_CUDA)
  module.def("codec_encode_cuda", &encode_whole_cuda, py::arg("codec"), py::arg("dtype"), py::arg("src"),
             py::arg("rows"), py::arg("cols"), py::arg("wire"), py::arg("stream"), py::arg("seed") = py::none());
  module.def("codec_decode_cuda", &decode_whole_cuda, py::arg("codec"), py::arg("dtype"), py::arg("wire"),
             py::arg("rows"), py::arg("cols"), py::arg("dst"), py::arg("stream"));
#endif
  module.def("codec_isa", [] { return std::string(host_loops().name); }, "Instruction set of the host loops in use.");
  module.def("codec_isas", &usable_isas, "Instruction sets that run here, slowest first; PIPECOMM_ISA forces one.");
}

}  // namespace pipecomm
