// The settings in the environment.
#include <cstdlib>
#include <map>
#include <sstream>

#include "control.h"
#include "forbid.h"

namespace fake_cuda {
namespace {

using Setter = void (*)(Machine&, std::size_t);

const std::map<std::string, Setter>& setters() {
  static const std::map<std::string, Setter> all = {
      {"num_devices", [](Machine& m, std::size_t value) { m.num_devices = static_cast<int>(value); }},
      {"memory_nbytes", [](Machine& m, std::size_t value) { m.memory_nbytes = value; }},
      {"waits_for_64_bit_values", [](Machine& m, std::size_t value) { m.waits_for_64_bit_values = value != 0; }},
      {"exports_memory", [](Machine& m, std::size_t value) { m.exports_memory = value != 0; }},
      {"has_ipc", [](Machine& m, std::size_t value) { m.has_ipc = value != 0; }},
      {"uses_host_addresses", [](Machine& m, std::size_t value) { m.uses_host_addresses = value != 0; }},
      {"reaches_peers", [](Machine& m, std::size_t value) { m.reaches_peers = value != 0; }},
      {"loads_lazily", [](Machine& m, std::size_t value) { m.loads_lazily = value != 0; }},
      {"is_coherent", [](Machine& m, std::size_t value) { m.is_coherent = value != 0; }},
      {"queue_length", [](Machine& m, std::size_t value) { m.queue_length = value; }},
      {"max_delay_us", [](Machine& m, std::size_t value) { m.max_delay_us = value; }},
  };
  return all;
}

Machine read_machine() {
  Machine machine;
  const char* text = std::getenv("FAKE_CUDA");
  std::istringstream words(text == nullptr ? "" : text);
  for (std::string word; std::getline(words, word, ',');) {
    const std::size_t equals = word.find('=');
    const auto found = setters().find(word.substr(0, equals));
    require(equals != std::string::npos && found != setters().end(), "FAKE_CUDA", "lists name=number, as in control.h");
    found->second(machine, std::stoull(word.substr(equals + 1)));
  }
  return machine;
}

}  // namespace

Machine& machine() {
  static Machine made = read_machine();
  return made;
}

}  // namespace fake_cuda
