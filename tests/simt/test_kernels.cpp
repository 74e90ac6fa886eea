// The codec's kernels, run from their own source, give the bytes of the host codec.
#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "bytes.h"
#include "check.h"
#include "simt.h"
// After simt.h, which stands in for the CUDA headers.
#include "codec/codec.h"
#include "codec/decode_kernel.cuh"
#include "codec/encode_kernel.cuh"
#include "codec/host.h"
#include "codec/kernel_choice.h"

namespace pipecomm {
namespace {

using check::Bytes;

struct Case {
  CodecSpec spec;
  DType dtype;
  Grid grid;
  std::size_t misalign_values;  // the tensor starts this many elements after a 16-byte boundary
  std::size_t misalign_wire;    // bytes
  unsigned num_blocks;
  simt::Order order;
};

std::string text_of(const Case& c) {
  return codec_to_string(c.spec) + " " + dtype_name(c.dtype) + " [" + std::to_string(c.grid.rows) + ", " +
         std::to_string(c.grid.cols) + "] values +" + std::to_string(c.misalign_values) + " wire +" +
         std::to_string(c.misalign_wire) + " blocks " + std::to_string(c.num_blocks);
}

// Normal values of very different sizes, and now and then a value at the edge of the format.
template <typename T>
void fill(std::byte* at, std::int64_t numel, std::mt19937& random) {
  const float edges[] = {0.0f,
                         -0.0f,
                         1e-40f,
                         -3e38f,
                         3e38f,
                         65504.0f,
                         std::numeric_limits<float>::infinity(),
                         std::numeric_limits<float>::quiet_NaN()};
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> percent(0, 399);
  for (std::int64_t i = 0; i < numel; ++i) {
    const auto pick = static_cast<std::size_t>(percent(random));
    const float value = pick < std::size(edges) ? edges[pick] : normal(random) * (i / 256 % 2 == 0 ? 1.0f : 1e-4f);
    const T coded = from_float<T>(value);
    std::memcpy(at + i * static_cast<std::int64_t>(sizeof(T)), &coded, sizeof(T));
  }
}

constexpr std::uint64_t kSequence = 9;

template <typename T>
void run_encode(const Case& c, const RunLayout& run, const std::byte* src, std::byte* wire) {
  const T* x = reinterpret_cast<const T*>(src);
  auto* out = reinterpret_cast<unsigned char*>(wire);
  const KernelNoise noise{{c.spec.seed, kSequence}, c.spec.rounding == Rounding::stochastic};
  choose_kernel(c.spec.id, run, [&](auto rule, auto group_size, auto unit_size, auto has_spikes) {
    simt::launch(c.num_blocks, kBlockThreads, c.order, [&] {
      encode_kernel<T, decltype(rule), group_size(), unit_size(), has_spikes()>(run, noise, x, out);
    });
  });
}

template <typename T>
void run_decode(const Case& c, const RunLayout& run, const std::byte* wire, std::byte* dst) {
  const auto* in = reinterpret_cast<const unsigned char*>(wire);
  T* x = reinterpret_cast<T*>(dst);
  choose_kernel(c.spec.id, run, [&](auto rule, auto group_size, auto unit_size, auto has_spikes) {
    simt::launch(c.num_blocks, kBlockThreads, c.order,
                 [&] { decode_kernel<T, decltype(rule), group_size(), unit_size(), has_spikes()>(run, in, x); });
  });
}

// A run that leaves out the first and the last block where there are enough.
RunLayout inner_run(const Case& c) {
  const std::int64_t all = num_groups(c.spec, c.grid);
  if (all < 4) return run_layout(c.spec, c.grid, 0, all);
  const std::int64_t begin = groups_that_fit(c.spec, c.grid, 0, 176);
  const RunLayout rest = run_layout(c.spec, c.grid, begin, all);
  return run_layout(c.spec, c.grid, begin,
                    groups_that_fit(c.spec, c.grid, begin, static_cast<std::size_t>(rest.nbytes) - 1));
}

template <typename T>
void check_encode(const Case& c, std::mt19937& random) {
  const std::int64_t numel = c.grid.rows * c.grid.cols;
  Bytes src(static_cast<std::size_t>(numel) * sizeof(T), c.misalign_values * sizeof(T));
  fill<T>(src.data(), numel, random);
  const RunLayout run = inner_run(c);
  Bytes expected(static_cast<std::size_t>(run.nbytes), c.misalign_wire);
  Bytes got(static_cast<std::size_t>(run.nbytes), c.misalign_wire);
  encode(c.spec, c.dtype, src.data(), c.grid, run.group_begin, run.group_begin + run.num_groups, expected.data(),
         kSequence);
  run_encode<T>(c, run, src.data(), got.data());
  if (!(got == expected)) check::fail(__FILE__, __LINE__, "encode: other bytes than the host: " + text_of(c));
  if (!got.guards_are_untouched()) check::fail(__FILE__, __LINE__, "encode: wrote outside the wire: " + text_of(c));
}

// Any bytes decode to the same values as on the host, with scales of every kind.
template <typename T>
void check_decode(const Case& c, std::mt19937& random) {
  const std::size_t nbytes = static_cast<std::size_t>(c.grid.rows * c.grid.cols) * sizeof(T);
  const RunLayout run = inner_run(c);
  Bytes wire(static_cast<std::size_t>(run.nbytes), c.misalign_wire);
  std::generate_n(wire.data(), run.nbytes, [&] { return static_cast<std::byte>(random() & 0xff); });
  Bytes expected(nbytes, c.misalign_values * sizeof(T));
  Bytes got(nbytes, c.misalign_values * sizeof(T));
  decode(c.spec, c.dtype, wire.data(), c.grid, run.group_begin, run.group_begin + run.num_groups, expected.data());
  run_decode<T>(c, run, wire.data(), got.data());
  if (!(got == expected)) check::fail(__FILE__, __LINE__, "decode: other bytes than the host: " + text_of(c));
  if (!got.guards_are_untouched()) check::fail(__FILE__, __LINE__, "decode: wrote outside the tensor: " + text_of(c));
}

const DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16};

void check_case(Case c) {
  std::mt19937 random(static_cast<unsigned>(c.grid.cols * 31 + c.grid.rows));
  for (const DType dtype : kDTypes) {
    c.dtype = dtype;
    dispatch_float(dtype, [&](auto value) {
      check_encode<decltype(value)>(c, random);
      check_decode<decltype(value)>(c, random);
    });
  }
}

void check_codec(const char* name) {
  const CodecSpec spec = parse_codec(name);
  const Grid grids[] = {{1, 1}, {4, 256}, {3, 771}, {5, 96}, {5, 129}, {7, 31}, {200, 3}, {2, 8192}};
  for (const Grid& grid : grids) {
    check_case({spec, DType::float32, grid, 0, 0, 2, simt::Order::ascending});
    check_case({spec, DType::float32, grid, 1, 3, 1, simt::Order::descending});
  }
  for (std::size_t misalign = 1; misalign < 16; misalign += 2) {
    check_case({spec, DType::float32, {2, 256}, misalign / 2, misalign, 1, simt::Order::ascending});
    check_case({spec, DType::float32, {2, 256}, 4, 8, 1, simt::Order::descending});
  }
}

TEST(int8_kernels_give_the_hosts_bytes_for_every_dtype_shape_and_alignment) { check_codec("int8"); }
TEST(int8_group_32_kernels_give_the_hosts_bytes) { check_codec("int8:group=32"); }
TEST(int8_group_128_kernels_give_the_hosts_bytes) { check_codec("int8:group=128,rounding=stochastic,seed=77"); }
TEST(int4_kernels_give_the_hosts_bytes_for_every_dtype_shape_and_alignment) { check_codec("int4"); }
TEST(int4_symmetric_kernels_give_the_hosts_bytes) { check_codec("int4-symmetric"); }
TEST(fp8_kernels_give_the_hosts_bytes) { check_codec("fp8"); }
TEST(fp8_group_32_kernels_give_the_hosts_bytes) { check_codec("fp8:group=32"); }
TEST(fp8_group_128_kernels_give_the_hosts_bytes) { check_codec("fp8:group=128"); }
TEST(nf4_kernels_give_the_hosts_bytes) { check_codec("nf4"); }
TEST(transforms_in_kernels_give_the_hosts_bytes) {
  for (const char* name : {"int8:hadamard=64", "int8:group=32,hadamard=64", "fp8:hadamard=64", "nf4:hadamard=64",
                           "fp8:group=32,hadamard=64"}) {
    check_codec(name);
  }
}
TEST(spikes_in_kernels_are_the_hosts) {
  for (const char* name : {"int8:group=32,spikes=4", "int4:spikes=1", "int4-symmetric:spikes=2,rounding=stochastic",
                           "fp8:group=128,spikes=1", "nf4:spikes=4"}) {
    check_codec(name);
  }
}
TEST(noise_in_kernels_is_the_hosts) {
  for (const char* name : {"int4:rounding=stochastic", "int4:hadamard=64,rounding=stochastic,seed=5",
                           "int4-symmetric:hadamard=64,rounding=stochastic"}) {
    check_codec(name);
  }
}

// What the stand-in promises: a missing lane, a wrong mask and a read across teams are seen.
std::string launch_error(const std::function<void()>& kernel) {
  try {
    simt::launch(1, 32, simt::Order::ascending, kernel);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(shuffle_exchanges_values_within_a_warp) {
  std::vector<std::uint32_t> got(64);
  simt::launch(1, 64, simt::Order::descending,
               [&] { got[threadIdx.x] = __shfl_xor_sync(0xffffffffu, threadIdx.x, 5); });
  for (std::uint32_t i = 0; i < 64; ++i) CHECK_EQ(got[i], i ^ 5u);
}

TEST(shuffle_with_a_lane_that_never_comes_is_a_deadlock) {
  const auto kernel = [] { return threadIdx.x == 3 ? 0u : __shfl_xor_sync(0xffffffffu, threadIdx.x, 1); };
  CHECK(launch_error(kernel).find("deadlock") != std::string::npos);
}

TEST(shuffle_with_different_masks_is_refused) {
  const auto kernel = [] { __shfl_xor_sync(threadIdx.x < 4 ? 0xffu : 0xffffffffu, threadIdx.x, 1); };
  CHECK(launch_error(kernel).find("masks") != std::string::npos);
}

TEST(shuffle_from_outside_its_mask_is_refused) {
  const auto kernel = [] { __shfl_xor_sync(0xfu << (threadIdx.x / 4 * 4), threadIdx.x, 4); };
  CHECK(launch_error(kernel).find("outside its mask") != std::string::npos);
}

TEST(barrier_makes_every_write_of_the_block_visible) {
  std::vector<int> seen(96, 0);
  int num_ready = 0;
  simt::launch(1, 96, simt::Order::ascending, [&] {
    ++num_ready;
    __syncthreads();
    seen[threadIdx.x] = num_ready;
  });
  for (const int count : seen) CHECK_EQ(count, 96);
}

}  // namespace
}  // namespace pipecomm

CHECK_MAIN()
