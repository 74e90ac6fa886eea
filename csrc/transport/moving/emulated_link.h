// A slow link, emulated: each record is stamped with the time at which it would have arrived.
#pragma once

#include <algorithm>
#include <cstdint>

#include "transport/api/options.h"
#include "transport/progress/progress.h"
#include "ways/ring.h"

namespace pipecomm {

class EmulatedLink {
 public:
  explicit EmulatedLink(LinkEmulation emulation) : emulation_(emulation) {}

  // For a record of `record_nbytes`, with which `nbytes` cross the link.
  RecordInfo stamp(std::size_t record_nbytes, std::size_t nbytes) {
    const std::int64_t now = now_ns();
    RecordInfo info{static_cast<std::uint32_t>(record_nbytes), now, now};
    if (!emulation_.is_on()) return info;
    info.sent_ns = std::max(now, free_ns_);
    const double seconds = emulation_.bytes_per_s > 0 ? static_cast<double>(nbytes) / emulation_.bytes_per_s : 0.0;
    free_ns_ = info.sent_ns + static_cast<std::int64_t>(seconds * 1e9);
    info.ready_ns = free_ns_ + static_cast<std::int64_t>(emulation_.latency_s * 1e9);
    return info;
  }

 private:
  const LinkEmulation emulation_;
  std::int64_t free_ns_ = 0;  // from when on the next record goes onto it
};

}  // namespace pipecomm
