// Random specs, shapes, runs and bytes through every instruction set's encode and decode; meant for sanitizer builds.
// Usage: fuzz_codec [iterations] [seed]. Prints what it did; exits with 1 at the first case that breaks a promise.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "codec/host.h"

namespace pipecomm {
namespace {

const char* const kNames[] = {"raw", "int8", "int4", "int4-symmetric", "fp8", "nf4", "int3", ""};
const char* const kOptions[] = {"group=32",
                                "group=64",
                                "group=128",
                                "hadamard=64",
                                "rounding=stochastic",
                                "rounding=nearest",
                                "spikes=1",
                                "spikes=4",
                                "seed=9",
                                "group=48",
                                "seed=",
                                "=",
                                "hadamard=18446744073709551616"};
const DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16};

class Fuzz {
 public:
  explicit Fuzz(std::uint64_t seed) : random_(seed) {}

  void run_once() {
    const CodecSpec spec = random_spec();
    if (spec.id == CodecId::raw) return;
    const Grid grid{below(6), below(below(4) == 0 ? 700 : 200)};
    const std::int64_t all = num_groups(spec, grid);
    const std::int64_t begin = groups_that_fit(spec, grid, 0, static_cast<std::size_t>(below(600)));
    const std::int64_t end = groups_that_fit(spec, grid, begin, static_cast<std::size_t>(below(4000)));
    require(begin <= end && end <= all, "a run within the grid");
    check_refusals(spec, grid, all);
    const DType dtype = kDTypes[below(3)];
    const auto loops = usable_host_loops();
    const HostLoops& isa = *loops[static_cast<std::size_t>(below(static_cast<std::int64_t>(loops.size())))];
    check_run(spec, dtype, run_layout(spec, grid, begin, end), grid, isa);
  }

  std::uint64_t num_runs() const { return num_runs_; }

 private:
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(limit));
  }
  template <std::size_t kSize>
  const char* one_of(const char* const (&texts)[kSize]) {
    return texts[below(kSize)];
  }

  static void require(bool holds, const char* expected) {
    if (holds) return;
    std::fprintf(stderr, "expected %s\n", expected);
    std::exit(EXIT_FAILURE);
  }

  // By name, often a wrong one, or by the fields of a header.
  CodecSpec random_spec() {
    const std::int64_t kind = below(4);
    if (kind > 0) {
      const bool is_likely = kind > 1;
      const auto id = static_cast<std::uint8_t>(
          is_likely ? 1 + below(5) + (below(2) == 0 ? 128 * below(2) : 32 * below(4)) : below(256));
      const auto size = static_cast<std::uint16_t>(is_likely ? 32 << below(3) : below(65536));
      CodecSpec spec = codec_from_wire(id, size).value_or(CodecSpec{});
      const bool has_noise = spec.id == CodecId::int8 || spec.id == CodecId::int4 || spec.id == CodecId::int4_symmetric;
      if (has_noise && below(3) == 0) spec.rounding = Rounding::stochastic;
      return spec;
    }
    std::string text = one_of(kNames);
    for (std::int64_t i = below(4); i > 0; --i) {
      text += text.find(':') == std::string::npos ? ":" : ",";
      text += one_of(kOptions);
    }
    if (below(8) == 0 && !text.empty())
      text.resize(static_cast<std::size_t>(below(static_cast<std::int64_t>(text.size()))));
    try {
      const CodecSpec spec = parse_codec(text);
      require(parse_codec(codec_to_string(spec)) == spec, "a name that names its codec");
      return spec;
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::config, "a config error");
      return {};
    }
  }

  void check_refusals(const CodecSpec& spec, const Grid& grid, std::int64_t all) {
    try {
      wire_nbytes(spec, grid, 0, all + 1 + below(3));
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::tensor, "a tensor error");
      return;
    }
    require(false, "a run past the end to be refused");
  }

  // Any bits; ordinary numbers in a third of the cases, so that codes are ordinary too.
  void fill(std::byte* at, std::size_t nbytes) {
    const bool is_tame = below(3) == 0;
    for (std::size_t i = 0; i < nbytes; i += 8) {
      std::uint64_t word = random_();
      if (is_tame) word = (word & 0x83ff83ff83ff83ffu) | 0x3c003c003c003c00u;
      std::memcpy(at + i, &word, std::min<std::size_t>(8, nbytes - i));
    }
  }

  // Exact allocations, so that a sanitizer sees every byte beyond.
  void check_run(const CodecSpec& spec, DType dtype, const RunLayout& run, const Grid& grid, const HostLoops& isa) {
    const auto wire_size = static_cast<std::size_t>(run.nbytes);
    const std::size_t nbytes = static_cast<std::size_t>(grid.rows * grid.cols) * dtype_nbytes(dtype);
    const auto x = std::make_unique<std::byte[]>(nbytes);
    const auto wire = std::make_unique<std::byte[]>(wire_size);
    fill(x.get(), nbytes);
    fill(wire.get(), wire_size);
    isa.decode(spec, dtype, run, wire.get(), x.get());
    require_no_new_infinity(dtype, run, wire.get(), x.get());
    fill(x.get(), nbytes);
    isa.encode(spec, dtype, run, random_(), x.get(), wire.get());
    if (below(2) == 0 && wire_size > 0) wire[static_cast<std::size_t>(below(run.nbytes))] ^= std::byte{0x40};
    isa.decode(spec, dtype, run, wire.get(), x.get());
    require_no_new_infinity(dtype, run, wire.get(), x.get());
    ++num_runs_;
  }

  static bool is_spike(const RunLayout& run, const std::byte* wire, std::int64_t group, int place) {
    const std::byte* places = wire + run.places_offset + group * run.num_spikes;
    return std::find(places, places + run.num_spikes, static_cast<std::byte>(place)) != places + run.num_spikes;
  }

  void require_no_new_infinity(DType dtype, const RunLayout& run, const std::byte* wire, const std::byte* x) {
    for (std::int64_t i = 0; i < run.num_groups; ++i) {
      const Group group = run.group(i);
      dispatch_float(dtype, [&](auto zero) {
        for (int j = 0; j < group.num_values; ++j) {
          auto value = zero;
          std::memcpy(&value, x + (group.element + j) * static_cast<std::int64_t>(sizeof(value)), sizeof(value));
          const bool is_infinite = (float_to_bits(to_float(value)) & 0x7fffffffu) == 0x7f800000u;
          require(!is_infinite || is_spike(run, wire, i, j), "no infinity from any bytes but those of a spike");
        }
      });
    }
  }

  std::mt19937_64 random_;
  std::uint64_t num_runs_ = 0;
};

}  // namespace
}  // namespace pipecomm

int main(int argc, char** argv) {
  const std::uint64_t iterations = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  pipecomm::Fuzz fuzz(seed);
  for (std::uint64_t i = 0; i < iterations; ++i) fuzz.run_once();
  std::printf("%llu iterations, %llu runs coded, seed %llu\n", static_cast<unsigned long long>(iterations),
              static_cast<unsigned long long>(fuzz.num_runs()), static_cast<unsigned long long>(seed));
  return fuzz.num_runs() > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
