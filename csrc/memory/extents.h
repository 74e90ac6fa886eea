// Which parts of which files are mapped where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <vector>

namespace pipecomm {

// `nbytes` from `offset` into a file, which follow each other there and in memory.
struct Extent {
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
  std::uint64_t file_id = 0;
  std::size_t offset = 0;
};

class Extents {
 public:
  // Joined with its neighbours where those go on in the file too, as the kernel joins mappings.
  void add(Extent extent) {
    auto after = places_.lower_bound(extent.data);
    if (after != places_.end() && follows(extent, after->second)) {
      extent.nbytes += after->second.nbytes;
      after = places_.erase(after);
    }
    if (after != places_.begin() && follows(std::prev(after)->second, extent)) {
      std::prev(after)->second.nbytes += extent.nbytes;
    } else {
      places_.emplace_hint(after, extent.data, extent);
    }
  }

  // What is mapped in a range goes; gives it.
  std::vector<Extent> cut(std::byte* data, std::size_t nbytes) {
    std::vector<Extent> removed;
    for (std::byte* end = data + nbytes; data < end;) {
      auto after = places_.upper_bound(data);
      if (after == places_.begin() || !holds(std::prev(after)->second, data)) {
        if (after == places_.end() || after->first >= end) break;
        data = after->first;
        continue;
      }
      const Extent whole = std::prev(after)->second;
      places_.erase(std::prev(after));
      const Extent cut_out = part(whole, data, std::min(end, whole.data + whole.nbytes));
      if (data > whole.data) add(part(whole, whole.data, data));
      data = cut_out.data + cut_out.nbytes;
      if (data < whole.data + whole.nbytes) add(part(whole, data, whole.data + whole.nbytes));
      removed.push_back(cut_out);
    }
    return removed;
  }

  // From `data` on, as far as it goes on in the file.
  std::optional<Extent> find(const std::byte* data) const {
    const auto after = places_.upper_bound(const_cast<std::byte*>(data));
    if (after == places_.begin() || !holds(std::prev(after)->second, data)) return std::nullopt;
    const Extent& whole = std::prev(after)->second;
    return part(whole, const_cast<std::byte*>(data), whole.data + whole.nbytes);
  }

  void erase_file(std::uint64_t file_id) {
    std::erase_if(places_, [&](const auto& item) { return item.second.file_id == file_id; });
  }

  std::size_t size() const { return places_.size(); }
  void clear() { places_.clear(); }
  auto begin() const { return places_.begin(); }
  auto end() const { return places_.end(); }

 private:
  static bool holds(const Extent& extent, const std::byte* data) { return data < extent.data + extent.nbytes; }
  static bool follows(const Extent& left, const Extent& right) {
    return left.data + left.nbytes == right.data && left.file_id == right.file_id &&
           left.offset + left.nbytes == right.offset;
  }
  static Extent part(const Extent& whole, std::byte* from, std::byte* to) {
    const auto skipped = static_cast<std::size_t>(from - whole.data);
    return {from, static_cast<std::size_t>(to - from), whole.file_id, whole.offset + skipped};
  }

  std::map<std::byte*, Extent> places_;  // by their first address
};

}  // namespace pipecomm
