// The sender thread takes records and control messages from the local transport and writes frames; the receiver thread
// reads frames and does the reverse. A broken stream ends both, and the life line with them.
#include "transport/remote/bridge.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "sockets/frames.h"
#include "sockets/tcp_socket.h"
#include "transport/api/listener.h"
#include "transport/progress/progress.h"
#include "transport/remote/bridge_rings.h"

namespace pipecomm {
namespace {

// Every change rings the bridge's bell; this is how often the other host is looked after.
constexpr std::chrono::nanoseconds kMaxSleep = std::chrono::seconds(1);
constexpr int kPollMs = 50;

}  // namespace

class Bridge::Impl {
 public:
  Impl(Fd stream, std::string endpoint, const FlowLimits& limits)
      : endpoint_(std::move(endpoint)), stream_(std::move(stream)), watch_(stream_.get()), incoming_(limits) {
    std::tie(own_end_, transports_end_) = make_socket_pair();
    sender_ = std::thread([this] { run("pipecomm-out", &Impl::send_all, &Impl::end_sending); });
    try {
      receiver_ = std::thread([this] { run("pipecomm-in", &Impl::receive_all, &Impl::end_line); });
    } catch (...) {
      end();
      sender_.join();
      throw;
    }
  }

  const std::string& endpoint() const { return endpoint_; }
  pid_t owner() const { return owner_; }

  Lifeline take_lifeline() {
    const int bell = ::fcntl(doorbell_.fd(), F_DUPFD_CLOEXEC, 0);
    if (bell < 0) throw_errno("cannot share a doorbell");
    return Lifeline(std::move(transports_end_), Segment::adopt(bell, kDoorbellNbytes));
  }

  void finish(Deadline deadline) {
    const std::lock_guard finishing(finish_mutex_);
    if (!sender_.joinable()) return;
    is_leaving_.store(true);
    doorbell_.ring();
    {
      std::unique_lock lock(mutex_);
      ended_.wait_until(lock, deadline, [this] { return num_running_ == 0; });
    }
    end();
    sender_.join();
    receiver_.join();
  }

  bool has_hung_up() const {
    pollfd item{stream_.get(), POLLRDHUP, 0};
    return ::poll(&item, 1, 0) > 0;
  }

  void forget_after_fork() noexcept {
    ::close(own_end_.get());
    ::close(stream_.get());
  }

 private:
  void run(const char* name, void (Impl::*body)(), void (Impl::*last)()) {
    ::pthread_setname_np(::pthread_self(), name);
    ::prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // emulated departures are due to the microsecond
    try {
      (this->*body)();
    } catch (const Error& error) {
      const std::string why = error.what();
      if (error.kind() == ErrorKind::pool_exhausted) give_up(why);
      note_cause(why);
      end();
    } catch (const std::exception& error) {
      note_cause(error.what());
      end();
    }
    (this->*last)();
    const std::lock_guard lock(mutex_);
    --num_running_;
    ended_.notify_all();
  }

  void note_cause(const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (cause_.empty()) cause_ = why;
  }

  // This process has nothing to go on with: the twin is told, unless it takes nothing any more.
  void give_up(const std::string& why) {
    note_cause("this rank's end of the link has failed: " + why);
    const std::unique_lock writing(stream_mutex_, std::chrono::seconds(1));
    if (!writing) return;
    const std::string bytes = pack_control(ControlKind::lost, 0, "its end of the link has failed: " + why);
    FrameBatch batch;
    batch.add(FrameKind::control, bytes.data(), bytes.size());
    try {
      batch.send(stream_.get(), [] { throw Error(ErrorKind::transport, "no room"); });
    } catch (const Error&) {  // then the end of the stream is all that is told
    }
  }

  // Both threads end soon; the receiver thread after it has passed on what has arrived.
  void end() {
    is_ended_.store(true);
    ::shutdown(stream_.get(), SHUT_RDWR);
    doorbell_.ring();
  }

  // --- the sender thread ---

  void send_all() {
    while (!is_ended_.load()) {
      const bool is_leaving = is_leaving_.load();
      if (relay()) continue;
      if (is_leaving && outgoing_.due_ns() == INT64_MAX) break;
      const std::uint32_t seen = doorbell_.listen();
      if (relay() || is_ended_.load() || is_leaving != is_leaving_.load()) {
        doorbell_.stop_listening();
        continue;
      }
      doorbell_.sleep(seen, sleep_limit());
      watch_.check();
    }
    if (!goodbye_.empty() && !is_ended_.load()) send_control(goodbye_);
  }

  void end_sending() { ::shutdown(stream_.get(), SHUT_WR); }

  std::chrono::nanoseconds sleep_limit() const {
    if (outgoing_.due_ns() == INT64_MAX) return kMaxSleep;
    return std::min(kMaxSleep, std::chrono::nanoseconds(std::max<std::int64_t>(outgoing_.due_ns() - now_ns(), 0)));
  }

  bool relay() {
    bool moved = relay_controls();
    moved |= relay_taken();
    FrameBatch batch;
    if (outgoing_.fill(batch)) {
      send(batch);
      moved = true;
    }
    return moved;
  }

  bool relay_controls() {
    bool moved = false;
    while (!is_line_closed_) {
      SocketMessage message;
      const SocketStatus status = receive_message(own_end_, message);
      if (status == SocketStatus::would_block) break;
      moved = true;
      is_line_closed_ = status == SocketStatus::closed;
      if (is_line_closed_) {
        is_leaving_.store(true);
      } else {
        relay_control(std::move(message));
      }
    }
    return moved;
  }

  void relay_control(SocketMessage message) {
    std::string bytes = message.bytes;
    Control control = unpack_control(std::move(message));
    if (control.kind == ControlKind::goodbye) {  // told when the records before it have left
      goodbye_ = std::move(bytes);
      is_leaving_.store(true);
      return;
    }
    if (control.kind == ControlKind::ring_made)
      incoming_.set_ring(Segment::adopt(control.fd.release(), control.value), control.value);
    send_control(bytes);
  }

  bool relay_taken() {
    const auto position = incoming_.taken_to_tell();
    if (!position) return false;
    FrameBatch batch;
    batch.add(FrameKind::taken, &*position, sizeof(*position));
    send(batch);
    return true;
  }

  void send_control(const std::string& bytes) {
    FrameBatch batch;
    batch.add(FrameKind::control, bytes.data(), bytes.size());
    send(batch);
  }

  void send(FrameBatch& batch) {
    const std::lock_guard writing(stream_mutex_);
    batch.send(stream_.get(), [this] {
      if (is_ended_.load()) throw Error(ErrorKind::transport, "ended");
      watch_.check();
    });
  }

  // --- the receiver thread ---

  void receive_all() {
    FrameReader reader(stream_.get());
    while (const auto header = reader.next()) {
      if (!take(reader, *header)) break;
    }
    if (!has_peers_goodbye_) note_cause("its process ended without a goodbye");
  }

  // The life line ends as that of a dead process does, after the reason.
  void end_line() {
    end();
    const std::lock_guard lock(mutex_);
    try {
      if (!cause_.empty()) send_message(own_end_, pack_control(ControlKind::lost, 0, cause_ + " (" + endpoint_ + ")"));
    } catch (const Error&) {  // then the end of the line is all that is told
    }
    ::shutdown(own_end_.get(), SHUT_RDWR);
    Progress::instance().kick();
  }

  bool take(FrameReader& reader, const FrameHeader& header) {
    switch (header.kind) {
      case FrameKind::record:
        return take_record(reader, header.nbytes);
      case FrameKind::taken:
        return take_taken(reader, header.nbytes);
      case FrameKind::control:
        return take_control(reader, header.nbytes);
    }
    return false;
  }

  bool take_record(FrameReader& reader, std::uint32_t nbytes) {
    if (!reader.read_body(incoming_.reserve(nbytes), nbytes)) return false;
    if (incoming_.publish(nbytes)) doorbell_.ring();
    Progress::instance().kick();
    return true;
  }

  bool take_taken(FrameReader& reader, std::uint32_t nbytes) {
    std::uint64_t position = 0;
    if (nbytes != sizeof(position)) throw Error(ErrorKind::transport, "expected 8 bytes that tell a position");
    if (!reader.read_body(reinterpret_cast<std::byte*>(&position), nbytes)) return false;
    if (outgoing_.release(position)) Progress::instance().kick();
    return true;
  }

  bool take_control(FrameReader& reader, std::uint32_t nbytes) {
    SocketMessage message;
    message.bytes.resize(nbytes);
    if (!reader.read_body(reinterpret_cast<std::byte*>(message.bytes.data()), nbytes)) return false;
    const std::string bytes = message.bytes;
    const Control control = unpack_control(std::move(message));
    if (control.kind == ControlKind::goodbye) has_peers_goodbye_ = true;
    deliver(bytes, control.kind == ControlKind::ring_made ? outgoing_.make_ring(control.value) : -1);
    return true;
  }

  // To the local transport, which reads all that there is whenever it looks.
  void deliver(const std::string& bytes, int fd) {
    while (send_message(own_end_, bytes, fd) == SocketStatus::would_block && !is_ended_.load()) {
      Progress::instance().kick();
      pollfd item{own_end_.get(), POLLOUT, 0};
      ::poll(&item, 1, kPollMs);
    }
    Progress::instance().kick();
  }

  const pid_t owner_ = ::getpid();
  const std::string endpoint_;
  const Fd stream_;
  Fd own_end_;
  Fd transports_end_;
  Doorbell doorbell_;
  HostWatch watch_;  // the sender thread's
  OutgoingRing outgoing_;
  IncomingRing incoming_;
  std::atomic<bool> is_leaving_{false};  // the local transport will give no more
  std::atomic<bool> is_ended_{false};
  bool is_line_closed_ = false;     // the sender thread's
  std::string goodbye_;             // the sender thread's
  bool has_peers_goodbye_ = false;  // the receiver thread's

  std::timed_mutex stream_mutex_;  // held while frames are written

  std::mutex mutex_;
  std::string cause_;    // guarded by mutex_
  int num_running_ = 2;  // guarded by mutex_
  std::condition_variable ended_;
  std::mutex finish_mutex_;
  std::thread sender_;
  std::thread receiver_;
};

namespace {

// Bridges that the end of the process has to wait for. Never destroyed: the end comes after static destructors too.
struct Registry {
  std::mutex mutex;
  std::vector<Bridge*> bridges;  // guarded by mutex
  const pid_t owner = ::getpid();
};

Registry& registry() {
  static Registry* const made = [] {
    auto* fresh = new Registry();
    std::atexit(finish_bridges);
    return fresh;
  }();
  return *made;
}

}  // namespace

void finish_bridges() {
  Registry& all = registry();
  if (all.owner != ::getpid()) return;
  const std::lock_guard lock(all.mutex);
  const auto deadline = std::chrono::steady_clock::now() + kFinishTimeout;
  for (Bridge* bridge : all.bridges) bridge->finish(deadline);
}

Bridge::Bridge(Fd stream, std::string endpoint, const FlowLimits& limits)
    : impl_(std::make_unique<Impl>(std::move(stream), std::move(endpoint), limits)) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.bridges.push_back(this);
}

Bridge::~Bridge() {
  if (impl_->owner() != ::getpid()) {  // the threads, and what they use, are the parent's
    static_cast<void>(impl_.release());
    return;
  }
  Registry& all = registry();
  {
    const std::lock_guard lock(all.mutex);
    std::erase(all.bridges, this);
  }
  impl_->finish(std::chrono::steady_clock::now());
}

const std::string& Bridge::endpoint() const { return impl_->endpoint(); }
Lifeline Bridge::take_lifeline() { return impl_->take_lifeline(); }
void Bridge::finish(Deadline deadline) { impl_->finish(deadline); }
bool Bridge::has_hung_up() const { return impl_->has_hung_up(); }
void Bridge::forget_after_fork() noexcept { impl_->forget_after_fork(); }

}  // namespace pipecomm
