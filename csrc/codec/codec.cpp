// The way into the host loops.
#include "codec/codec.h"

#include <cfenv>
#include <string>

#include "base/error.h"
#include "codec/host.h"

namespace pipecomm {
namespace {

void check_dtype(DType dtype) {
  if (is_quantizable(dtype)) return;
  throw Error(ErrorKind::tensor, std::string("expected float32, bfloat16 or float16 for a quantizing codec; got ") +
                                     dtype_name(dtype) + "; send other dtypes with \"raw\"");
}

// Encode and decode need rounding to nearest and subnormals, whatever mode the caller's thread is in.
class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&saved_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace

void encode(const CodecSpec& spec, DType dtype, const void* src, const Grid& grid, std::int64_t group_begin,
            std::int64_t group_end, void* wire, std::uint64_t sequence) {
  const RunLayout layout = run_layout(spec, grid, group_begin, group_end);
  check_dtype(dtype);
  const HostLoops& loops = host_loops();
  const DefaultFloatMode mode;
  loops.encode(spec, dtype, layout, sequence, static_cast<const std::byte*>(src), static_cast<std::byte*>(wire));
}

void decode(const CodecSpec& spec, DType dtype, const void* wire, const Grid& grid, std::int64_t group_begin,
            std::int64_t group_end, void* dst) {
  const RunLayout layout = run_layout(spec, grid, group_begin, group_end);
  check_dtype(dtype);
  const HostLoops& loops = host_loops();
  const DefaultFloatMode mode;
  loops.decode(spec, dtype, layout, static_cast<const std::byte*>(wire), static_cast<std::byte*>(dst));
}

}  // namespace pipecomm
