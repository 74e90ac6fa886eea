// The host loops' part in spikes.h: takes spikes out of a batch before it is encoded, and puts them back where it was
// decoded. Local to the including file for the reason given in host_loops.h.
#pragma once

#include "codec/scalar_groups.h"
#include "codec/spikes.h"
#include "codec/walk.h"

namespace pipecomm {
namespace {

// The wire's bytes for the spikes of one group.
template <typename Byte>
struct SpikeBytes {
  Byte* values;  // bf16
  Byte* places;

  SpikeBytes(const RunLayout& run, Byte* wire, std::int64_t index)
      : values(wire + run.spikes_offset + index * run.num_spikes * 2),
        places(wire + run.places_offset + index * run.num_spikes) {}
};

// A copy of a batch, without its spikes.
template <class Isa, typename T, int kGroupSize>
class SpikeStage {
 public:
  // Writes the spikes of `batch` down.
  const EncodeBatch& take(const RunLayout& run, const EncodeBatch& batch, std::byte* wire) {
    staged_ = batch;
    T stand_in[kBatchSize] = {};
    for (int g = 0; g < batch.size; ++g) {
      __builtin_memcpy(at(g, 0), batch.x[g], static_cast<std::size_t>(batch.count[g]) * sizeof(T));
      staged_.x[g] = at(g, 0);
      if (run.has_zeros) stand_in[g] = read<T>(at(g, place_of_extreme(g, false)));
    }
    // Group after group, so that none waits for what was just written to it.
    for (int s = 0; s < run.num_spikes; ++s) {
      for (int g = 0; g < batch.size; ++g) {
        const SpikeBytes<std::byte> to(run, wire, batch.first_group - run.group_begin + g);
        const int place = place_of_extreme(g, true);
        write(to.values + 2 * s, spike_bits(read_float<T>(at(g, 0), place)));
        to.places[s] = static_cast<std::byte>(place);
        write(at(g, place), stand_in[g]);
      }
    }
    return staged_;
  }

 private:
  std::byte* at(int g, int i) { return reinterpret_cast<std::byte*>(room_ + g * kGroupSize + i); }

  // Of largest or smallest magnitude, the first of several.
  int place_of_extreme(int g, bool is_largest) {
    const std::byte* x = at(g, 0);
    const int count = staged_.count[g];
    if (count != kGroupSize) {
      return Scalar<T>::place_of(x,
                                 is_largest ? Scalar<T>::max_magnitude(x, count) : Scalar<T>::min_magnitude(x, count));
    }
    const std::uint32_t bits =
        is_largest ? Isa::template max_magnitude<kGroupSize>(x, T{}) : Isa::template min_magnitude<kGroupSize>(x, T{});
    return Isa::template place_of<kGroupSize>(x, T{}, bits);
  }

  EncodeBatch staged_;
  alignas(64) T room_[std::size_t{kBatchSize} * kGroupSize];
};

// Any bytes are safe: a place behind the group's last value is none.
template <typename T>
void put_spikes(const RunLayout& run, const DecodeBatch& batch, const std::byte* wire) {
  for (int g = 0; g < batch.size; ++g) {
    const SpikeBytes<const std::byte> from(run, wire, batch.first_group - run.group_begin + g);
    for (int s = run.num_spikes - 1; s >= 0; --s) {
      const int place = static_cast<int>(from.places[s]);
      if (place >= batch.count[g]) continue;
      const float spike = read_float<Bf16>(from.values, s);
      write(batch.x[g] + static_cast<std::size_t>(place) * sizeof(T), spike_value<T>(spike));
    }
  }
}

}  // namespace
}  // namespace pipecomm
