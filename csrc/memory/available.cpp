// Reads /proc/meminfo, /proc/self/cgroup, /proc/self/mountinfo and the files of the control groups.
#include "memory/available.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

namespace pipecomm {
namespace {

// What a limit must leave for what comes with a request: page tables and the like (under 1 %), and the pages that the
// process touches until it has handled the error. Beyond the limit the kernel kills.
constexpr std::size_t kReserveNbytes = std::size_t{8} << 20;
constexpr std::size_t kReserveShare = 64;

// The two kinds of control groups name the same things differently. v1's totals include the groups below.
struct Version {
  const char *limit, *usage, *inactive_file, *active_file;
};
constexpr Version kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"};
constexpr Version kV2{"memory.max", "memory.current", "inactive_file", "active_file"};

// Where a process stands in a hierarchy of control groups.
struct ControlGroup {
  const Version* version;
  std::string mount;  // the folder of the topmost group that can be seen
  std::string path;   // below it: "" or "/a/b"
};

// The number in a file; none where it is missing or says "max".
std::optional<std::size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? std::optional(value) : std::nullopt;
}

// The number after a name in a file of lines "name number".
std::size_t read_field(const std::string& path, const std::string& field) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    std::size_t value = 0;
    if (words >> name >> value && name == field) return value;
  }
  return 0;
}

bool has_word(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// The path behind the line of /proc/self/cgroup that lists `controller`; v2's lists none.
std::optional<std::string> path_in(const std::string& root, const std::string& controller) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? controllers.empty() : has_word(controllers, controller)) return line.substr(second + 1);
  }
  return std::nullopt;
}

// `path` as seen below a mount that shows the hierarchy from `mounted` on; the mount itself where it lies elsewhere, as
// in a container that sees its own group only.
std::string below(const std::string& mounted, const std::string& path) {
  const std::string top = mounted == "/" ? "" : mounted;
  if (!path.starts_with(top + "/") || path.starts_with("/..")) return "";
  return path == "/" ? "" : path.substr(top.size());
}

std::vector<ControlGroup> control_groups(const std::string& root) {
  std::vector<ControlGroup> groups;
  std::ifstream file(root + "/proc/self/mountinfo");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t separator = line.find(" - ");
    if (separator == std::string::npos) continue;
    std::istringstream before(line), after(line.substr(separator + 3));
    std::string skipped, mounted, mount, type, options;
    before >> skipped >> skipped >> skipped >> mounted >> mount;
    after >> type >> skipped >> options;
    const bool is_v1 = type == "cgroup" && has_word(options, "memory");
    if (!is_v1 && type != "cgroup2") continue;
    if (const auto path = path_in(root, is_v1 ? "memory" : "")) {
      groups.push_back({is_v1 ? &kV1 : &kV2, root + mount, below(mounted, *path)});
    }
  }
  return groups;
}

// What the limit of one group leaves; file pages count as free, since the kernel drops them before it kills.
AvailableMemory left_in(const std::string& folder, const Version& version) {
  const auto limit = read_number(folder + "/" + version.limit);
  const auto usage = read_number(folder + "/" + version.usage);
  if (!limit || !usage) return {};
  const std::string stat = folder + "/memory.stat";
  const std::size_t dropped = read_field(stat, version.inactive_file) + read_field(stat, version.active_file);
  const std::size_t used = *usage - std::min(*usage, dropped);
  const std::size_t room = *limit - std::min(*limit, used);
  const std::size_t reserve = std::min(room, kReserveNbytes + room / kReserveShare);
  return {room - reserve, "under the memory limit of " + folder + ": " + std::to_string(*limit) + " bytes, " +
                              std::to_string(used) + " in use, " + std::to_string(reserve) +
                              " kept for the process itself; ask for less, free some, or raise the limit"};
}

}  // namespace

AvailableMemory available_memory(const std::string& root) {
  AvailableMemory least;
  if (const std::size_t kilobytes = read_field(root + "/proc/meminfo", "MemAvailable:")) {
    least = {kilobytes * 1024, "on this machine"};
  }
  for (ControlGroup& group : control_groups(root)) {
    while (true) {
      AvailableMemory left = left_in(group.mount + group.path, *group.version);
      if (left.nbytes < least.nbytes) least = std::move(left);
      if (group.path.empty()) break;
      group.path.resize(group.path.rfind('/'));
    }
  }
  return least;
}

}  // namespace pipecomm
