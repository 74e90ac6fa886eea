// Ranks as communicators of one process, and short ways to send floats between them.
#pragma once

#include <chrono>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "slow_device.h"
#include "transport/api/listener.h"

using namespace pipecomm;
using namespace std::chrono_literals;

using CommunicatorPtr = std::shared_ptr<Communicator>;
using Floats = std::vector<float>;

using Listeners = std::vector<std::unique_ptr<Listener>>;

// Tensors cross in slots of this device.
inline CommunicatorOptions on(std::shared_ptr<Device> device) {
  CommunicatorOptions options;
  options.stand_in = std::move(device);
  options.limits.max_nbytes = 1 << 20;  // 8 MiB of slots
  return options;
}

// With IN_SLOTS in the environment, the tensors of all tests cross as a device's do.
inline bool in_slots() { return std::getenv("IN_SLOTS") != nullptr; }

inline CommunicatorOptions with_device(CommunicatorOptions options) {
  if (!in_slots() || options.stand_in) return options;
  options.stand_in = slow_device();
  // 8 MiB of slots, so that about as much is on its way as in a ring by default.
  if (options.limits.max_nbytes == FlowLimits{}.max_nbytes) options.limits.max_nbytes = 1 << 20;
  return options;
}

inline std::vector<CommunicatorPtr> connect_listeners(const Listeners& listeners,
                                                      const CommunicatorOptions& chosen = {}) {
  const CommunicatorOptions options = with_device(chosen);
  std::vector<std::string> addresses;
  for (const auto& listener : listeners) addresses.push_back(listener->address());
  std::vector<CommunicatorPtr> made(listeners.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < listeners.size(); ++rank) {
    threads.emplace_back(
        [&, rank] { made[rank] = listeners[rank]->connect(static_cast<int>(rank), addresses, options, 10s); });
  }
  for (std::thread& thread : threads) thread.join();
  return made;
}

// Connects one rank for each option.
inline std::vector<CommunicatorPtr> connect_each(const std::vector<CommunicatorOptions>& options) {
  Listeners listeners;
  std::vector<std::string> addresses;
  for (std::size_t rank = 0; rank < options.size(); ++rank) {
    listeners.push_back(make_listener());
    addresses.push_back(listeners.back()->address());
  }
  std::vector<CommunicatorPtr> made(options.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < options.size(); ++rank) {
    threads.emplace_back(
        [&, rank] { made[rank] = listeners[rank]->connect(static_cast<int>(rank), addresses, options[rank], 10s); });
  }
  for (std::thread& thread : threads) thread.join();
  return made;
}

inline std::vector<CommunicatorPtr> connect_all(std::size_t size, const CommunicatorOptions& options = {}) {
  Listeners listeners;
  for (std::size_t rank = 0; rank < size; ++rank) listeners.push_back(make_listener());
  return connect_listeners(listeners, options);
}

inline TensorView view(Floats& values) {
  return {values.data(), DType::float32, {static_cast<std::int64_t>(values.size())}};
}

inline SendPart part(Floats& values, const char* codec = "raw") {
  return {view(values), parse_codec(codec), false, false};
}

inline Floats ramp(std::size_t count, float start = 0) {
  Floats values(count);
  std::iota(values.begin(), values.end(), start);
  return values;
}

// In slots, also small values are read after the call, so that a test which does not wait sends a copy.
inline std::shared_ptr<Transfer> post_send(const CommunicatorPtr& from, int peer, Floats& values, MessageKey key = {}) {
  if (!in_slots()) return from->send(peer, key, {part(values)}, nullptr);
  const auto kept = std::make_shared<Floats>(values);
  return from->send(peer, key, {part(*kept)}, kept);
}

inline std::shared_ptr<Transfer> post_receive(const CommunicatorPtr& at, int peer, Floats& values,
                                              MessageKey key = {}) {
  return at->receive(peer, key, {view(values)}, nullptr);
}

inline MessageKey tagged(std::int32_t tag) { return {tag, Direction::none, kNoMicrobatch, 0}; }
inline MessageKey in_epoch(std::uint32_t epoch) { return {0, Direction::forward, 0, epoch}; }
