// The smallest test frame that names what failed: TEST(name) { CHECK(...); } and CHECK_MAIN() once per executable.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"

namespace check {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

// Thrown by a failed check; ends the test it is in.
struct Failure {
  std::string text;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
  std::ostringstream out;
  out << file << ":" << line << ": " << text;
  throw Failure{out.str()};
}

template <typename A, typename B>
void equal(const A& got, const B& expected, const char* text, const char* file, int line) {
  if (got == expected) return;
  std::ostringstream out;
  out << text << ": got " << +got << ", expected " << +expected;
  fail(file, line, out.str());
}

inline void equal(const std::string& got, const std::string& expected, const char* text, const char* file, int line) {
  if (got != expected) fail(file, line, std::string(text) + ": got \"" + got + "\", expected \"" + expected + "\"");
}

template <typename Fn>
void error(pipecomm::ErrorKind kind, const char* part, Fn&& fn, const char* text, const char* file, int line) {
  try {
    fn();
  } catch (const pipecomm::Error& caught) {
    if (caught.kind() != kind) fail(file, line, std::string(text) + ": error of another kind: " + caught.what());
    if (std::string(caught.what()).find(part) == std::string::npos) {
      fail(file, line, std::string(text) + ": the text lacks \"" + part + "\": " + caught.what());
    }
    return;
  }
  fail(file, line, std::string(text) + ": no error was thrown");
}

inline bool passes(const Test& test) {
  try {
    test.body();
    return true;
  } catch (const Failure& failure) {
    std::fprintf(stderr, "FAIL %s\n  %s\n", test.name, failure.text.c_str());
  } catch (const std::exception& caught) {
    std::fprintf(stderr, "FAIL %s\n  threw: %s\n", test.name, caught.what());
  }
  return false;
}

// Runs the tests whose name holds `filter`; returns the process exit code.
inline int run(const std::string& filter) {
  int num_run = 0;
  int num_failed = 0;
  for (const Test& test : tests()) {
    if (std::string(test.name).find(filter) == std::string::npos) continue;
    ++num_run;
    if (!passes(test)) ++num_failed;
  }
  std::printf("%d run, %d failed\n", num_run, num_failed);
  return num_run == 0 || num_failed != 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

}  // namespace check

#define TEST(name)                                                  \
  static void test_##name();                                        \
  static const check::Register register_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQ(got, expected) check::equal((got), (expected), #got " == " #expected, __FILE__, __LINE__)

// The expression throws a pipecomm::Error of this kind whose text holds `part` ("" for any text).
#define CHECK_ERROR(kind, part, expression) \
  check::error((kind), (part), [&] { (void)(expression); }, #expression, __FILE__, __LINE__)

#define CHECK_MAIN() \
  int main(int argc, char** argv) { return check::run(argc > 1 ? argv[1] : ""); }
