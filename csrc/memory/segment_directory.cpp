// A map from addresses to segments.
#include "memory/segment_directory.h"

#include <algorithm>
#include <iterator>

namespace pipecomm {

// Never destroyed: pools may live until the process ends.
SegmentDirectory& SegmentDirectory::instance() {
  static auto* const kDirectory = new SegmentDirectory();
  return *kDirectory;
}

std::uint64_t SegmentDirectory::add(const std::byte* data, std::size_t nbytes, int fd) {
  const std::lock_guard lock(mutex_);
  places_[data] = {++last_id_, fd, 0, nbytes};
  return last_id_;
}

void SegmentDirectory::add_again(const std::byte* data, std::size_t nbytes, const std::byte* original) {
  auto place = find(original);
  if (!place) return;
  place->nbytes = nbytes;
  const std::lock_guard lock(mutex_);
  places_[data] = *place;
}

void SegmentDirectory::remove(const std::byte* data, std::size_t nbytes) {
  const std::lock_guard lock(mutex_);
  places_.erase(places_.lower_bound(data), places_.lower_bound(data + nbytes));
}

void SegmentDirectory::remove_segment(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(places_, [&](const auto& item) { return item.second.id == id; });
  num_removed_.fetch_add(1);
}

std::optional<SegmentPlace> SegmentDirectory::find(const std::byte* data) const {
  const std::lock_guard lock(mutex_);
  const auto after = places_.upper_bound(data);
  if (after == places_.begin()) return std::nullopt;
  const auto& [start, place] = *std::prev(after);
  const auto skipped = static_cast<std::size_t>(data - start);
  if (skipped >= place.nbytes) return std::nullopt;
  return SegmentPlace{place.id, place.fd, place.offset + skipped, place.nbytes - skipped};
}

bool SegmentDirectory::has(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(places_.begin(), places_.end(), [&](const auto& item) { return item.second.id == id; });
}

}  // namespace pipecomm
