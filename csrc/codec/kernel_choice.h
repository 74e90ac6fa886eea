// Which kernel codes a run: its rule, group size, unit (kernels.cuh) and whether it has spikes, as template arguments.
#pragma once

#include <type_traits>

#include "codec/codec.h"
#include "codec/layout.h"
#include "codec/rules.h"

namespace pipecomm {

template <int kValue>
using Size = std::integral_constant<int, kValue>;

// Values per team: groups that share a transform block are coded together.
inline int unit_size(const RunLayout& run) { return run.has_transform ? kTransformWidth : run.group_size; }

// Groups of 64 with a transform are kernels that also serve without one; with spikes there is none.
template <class Rule, int kGroupSize, typename Fn>
void choose_spikes(const RunLayout& run, const Fn& fn) {
  if (run.num_spikes != 0) return fn(Rule{}, Size<kGroupSize>{}, Size<kGroupSize>{}, std::true_type{});
  fn(Rule{}, Size<kGroupSize>{}, Size<kGroupSize>{}, std::false_type{});
}

template <class Rule, typename Fn>
void choose_sizes(const RunLayout& run, const Fn& fn) {
  if (run.group_size == 32 && run.has_transform) return fn(Rule{}, Size<32>{}, Size<64>{}, std::false_type{});
  if (run.group_size == 32) return choose_spikes<Rule, 32>(run, fn);
  if (run.group_size == 64) return choose_spikes<Rule, 64>(run, fn);
  choose_spikes<Rule, 128>(run, fn);
}

// Calls fn(Rule{}, Size<group>{}, Size<unit>{}, has_spikes).
template <typename Fn>
void choose_kernel(CodecId codec, const RunLayout& run, const Fn& fn) {
  if (codec == CodecId::int8) return choose_sizes<Int8Rule>(run, fn);
  if (codec == CodecId::fp8) return choose_sizes<Fp8Rule>(run, fn);
  if (codec == CodecId::int4_symmetric) return choose_spikes<Int4SymmetricRule, 64>(run, fn);
  if (codec == CodecId::nf4) return choose_spikes<Nf4Rule, 64>(run, fn);
  if (run.has_transform) return fn(Int4Rule{}, Size<32>{}, Size<64>{}, std::false_type{});
  choose_spikes<Int4Rule, 32>(run, fn);
}

// Calls fn as choose_kernel does, for every kernel there is, with a value of every dtype in front: fn(T{}, ...).
template <typename Fn>
void for_each_kernel(const Fn& fn) {
  RunLayout run = {};
  const auto choose = [&](int codec, DType dtype) {
    dispatch_float(dtype, [&](auto value) {
      choose_kernel(static_cast<CodecId>(codec), run, [&](auto... choice) { fn(value, choice...); });
    });
  };
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (int codec = static_cast<int>(CodecId::int8); codec <= static_cast<int>(CodecId::nf4); ++codec) {
      for (run.group_size = 32; run.group_size <= 128; run.group_size *= 2) {
        run.has_transform = false;
        for (run.num_spikes = 0; run.num_spikes < 2; ++run.num_spikes) choose(codec, dtype);
        run.num_spikes = 0;
        run.has_transform = true;
        choose(codec, dtype);
      }
    }
  }
}

}  // namespace pipecomm
