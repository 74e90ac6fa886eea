// Which kernel codes a run: its rule, group size and unit (kernels.cuh), as template arguments.
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

template <class Rule, typename Fn>
void choose_sizes(const RunLayout& run, const Fn& fn) {
  if (run.group_size == 32 && run.has_transform) return fn(Rule{}, Size<32>{}, Size<64>{});
  if (run.group_size == 32) return fn(Rule{}, Size<32>{}, Size<32>{});
  if (run.group_size == 64) return fn(Rule{}, Size<64>{}, Size<64>{});
  fn(Rule{}, Size<128>{}, Size<128>{});
}

// Calls fn(Rule{}, Size<group>{}, Size<unit>{}).
template <typename Fn>
void choose_kernel(CodecId codec, const RunLayout& run, const Fn& fn) {
  if (codec == CodecId::int8) return choose_sizes<Int8Rule>(run, fn);
  if (codec == CodecId::fp8) return choose_sizes<Fp8Rule>(run, fn);
  if (codec == CodecId::int4_symmetric) return fn(Int4SymmetricRule{}, Size<64>{}, Size<64>{});
  if (codec == CodecId::nf4) return fn(Nf4Rule{}, Size<64>{}, Size<64>{});
  if (run.has_transform) return fn(Int4Rule{}, Size<32>{}, Size<64>{});
  fn(Int4Rule{}, Size<32>{}, Size<32>{});
}

}  // namespace pipecomm
