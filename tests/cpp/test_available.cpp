// What a process may still take: the machine's memory and the limits of control groups, from files made up here.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"
#include "memory/available.h"

using namespace pipecomm;
namespace fs = std::filesystem;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kGiB = kMiB << 10;

// A root folder with a machine of 64 GiB; gone with the test.
class System {
 public:
  System() {
    char name[] = "/tmp/pipecomm-available-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    root_ = name;
    write("/proc/meminfo", "MemTotal: 99999999999 kB\nMemFree: 1 kB\nMemAvailable: 67108864 kB\n");
  }
  ~System() { fs::remove_all(root_); }
  System(const System&) = delete;
  System& operator=(const System&) = delete;

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  void process(const std::string& cgroup, const std::string& mountinfo) const {
    write("/proc/self/cgroup", cgroup);
    write("/proc/self/mountinfo", "22 1 0:21 / /proc rw - proc proc rw\n" + mountinfo);
  }
  void v2(const std::string& folder, const std::string& limit, std::size_t used, std::size_t file_pages = 0) const {
    write(folder + "/memory.max", limit + "\n");
    write(folder + "/memory.current", std::to_string(used) + "\n");
    write(folder + "/memory.stat", "anon 5\ninactive_file " + std::to_string(file_pages) + "\nactive_file 0\n");
  }
  void v1(const std::string& folder, std::size_t limit, std::size_t used, std::size_t file_pages = 0) const {
    write(folder + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    write(folder + "/memory.usage_in_bytes", std::to_string(used) + "\n");
    write(folder + "/memory.stat", "inactive_file 0\ntotal_active_file " + std::to_string(file_pages) + "\n");
  }
  AvailableMemory look() const { return available_memory(root_); }

 private:
  std::string root_;
};

const std::string kMountV2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
const std::string kMountV1 =
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

// The limit leaves `room`, less what is kept for the process itself.
void check_leaves(const AvailableMemory& found, std::size_t room, const std::string& folder) {
  CHECK(found.nbytes < room);
  CHECK(found.nbytes > room - room / 32 - 16 * kMiB);
  CHECK(found.where.find(folder + ":") != std::string::npos);
}

}  // namespace

TEST(machine_alone_gives_what_it_has_available) {
  const System system;
  CHECK_EQ(system.look().nbytes, 64 * kGiB);
  CHECK(system.look().where == "on this machine");
}

TEST(machine_that_says_nothing_sets_no_bound) { CHECK_EQ(available_memory("/nowhere").nbytes, SIZE_MAX); }

TEST(v2_limit_leaves_what_is_not_used) {
  const System system;
  system.process("0::/jobs/one\n", kMountV2);
  system.v2("/sys/fs/cgroup/jobs/one", std::to_string(4 * kGiB), kGiB);
  check_leaves(system.look(), 3 * kGiB, "/sys/fs/cgroup/jobs/one");
}

TEST(v1_limit_leaves_what_is_not_used) {
  const System system;
  system.process("5:cpu:/other\n4:memory:/one\n0::/\n", kMountV1);
  system.v1("/sys/fs/cgroup/memory/one", 4 * kGiB, kGiB);
  check_leaves(system.look(), 3 * kGiB, "/sys/fs/cgroup/memory/one");
}

TEST(controllers_that_share_a_v1_hierarchy_are_told_apart) {
  const System system;
  system.process("4:cpuset,memory:/one\n", "35 31 0:32 / /cg rw - cgroup cgroup rw,cpuset,memory\n");
  system.v1("/cg/one", 2 * kGiB, kGiB);
  check_leaves(system.look(), kGiB, "/cg/one");
}

TEST(the_least_up_the_tree_decides) {
  const System system;
  system.process("0::/a/b/c\n", kMountV2);
  system.v2("/sys/fs/cgroup/a/b/c", "max", kGiB);
  system.v2("/sys/fs/cgroup/a/b", std::to_string(9 * kGiB), kGiB);
  system.v2("/sys/fs/cgroup/a", std::to_string(10 * kGiB), 8 * kGiB);
  check_leaves(system.look(), 2 * kGiB, "/sys/fs/cgroup/a");
}

TEST(limit_above_what_the_machine_has_does_not_count) {
  const System system;
  system.process("4:memory:/one\n", kMountV1);
  system.v1("/sys/fs/cgroup/memory/one", 9223372036854771712U, kGiB);
  CHECK(system.look().where == "on this machine");
}

TEST(container_that_sees_its_own_group_only_finds_its_limit) {
  for (const char* path : {"/docker/abc", "/docker/abc/sub", "/", "/../other"}) {
    const System system;
    const bool has_namespace = std::string(path) == "/";
    const std::string mounted = has_namespace ? "/" : "/docker/abc";
    system.process(std::string("4:memory:") + path + "\n",
                   "35 31 0:32 " + mounted + " /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
    system.v1("/sys/fs/cgroup/memory", 3 * kGiB, kGiB);
    check_leaves(system.look(), 2 * kGiB, "/sys/fs/cgroup/memory");
  }
}

TEST(pages_of_files_count_as_free) {
  const System system;
  system.process("0::/one\n", kMountV2);
  system.v2("/sys/fs/cgroup/one", std::to_string(4 * kGiB), 4 * kGiB, kGiB);
  check_leaves(system.look(), kGiB, "/sys/fs/cgroup/one");
  system.process("4:memory:/one\n", kMountV1);
  system.v1("/sys/fs/cgroup/memory/one", 4 * kGiB, 4 * kGiB, kGiB);
  check_leaves(system.look(), kGiB, "/sys/fs/cgroup/memory/one");
}

TEST(limit_that_is_used_up_leaves_nothing) {
  for (const std::size_t used : {kGiB - 1, kGiB, 2 * kGiB}) {
    const System system;
    system.process("0::/one\n", kMountV2);
    system.v2("/sys/fs/cgroup/one", std::to_string(kGiB), used);
    CHECK_EQ(system.look().nbytes, std::size_t{0});
  }
}

TEST(text_names_limit_use_and_what_to_do) {
  const System system;
  system.process("0::/one\n", kMountV2);
  system.v2("/sys/fs/cgroup/one", "1000000000", 400000000);
  const std::string text = system.look().where;
  for (const char* part : {"/one: 1000000000 bytes, 400000000 in use", "ask for less", "raise the limit"}) {
    CHECK(text.find(part) != std::string::npos);
  }
}

CHECK_MAIN()
