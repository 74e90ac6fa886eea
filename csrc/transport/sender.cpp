// Headers, chunks and the emulated clock of the link.
#include "transport/sender.h"

#include <algorithm>
#include <cstring>

#include "transport/progress.h"

namespace pipecomm {
namespace {

// Records written before others get their turn under the progress lock.
constexpr int kRecordsPerPump = 4;

}  // namespace

bool Sender::pump(LinkCounters& counters) {
  int num_written = 0;
  while (!queue_.empty() && ring_ && num_written < kRecordsPerPump) {
    const TransferPtr transfer = queue_.front();
    if (!write_record(*transfer)) break;
    ++num_written;
    if (part_index_ < transfer->to_send.size()) continue;
    queue_.pop_front();
    part_index_ = 0;
    counters.messages_sent += 1;
    counters.payload_nbytes_sent += transfer->payload;
    counters.wire_nbytes_sent += transfer->wire;
    transfer->finish();
    transfer->release();
  }
  return num_written > 0;
}

bool Sender::write_record(TransferState& transfer) {
  const SendPart& part = transfer.to_send[part_index_];
  MessageHeader header;
  std::size_t header_nbytes = 0;
  if (!is_part_begun_) {
    header = make_header(transfer);
    header_nbytes = header.nbytes();
  }
  const std::size_t nbytes = chunk_nbytes(part);
  std::byte* out = ring_->reserve(header_nbytes + nbytes);
  if (out == nullptr) return false;
  if (!is_part_begun_) {
    write_header(header, out);
    if (part_index_ == 0) first_seq_ = header.seq;
    ++next_seq_;
    is_part_begun_ = true;
    transfer.payload += header.payload_nbytes;
  }
  write_chunk(part, out + header_nbytes, nbytes);
  const RecordInfo info = stamp(header_nbytes + nbytes);
  if (transfer.clock.started_ns == 0) transfer.clock.started_ns = info.sent_ns;
  transfer.wire += header_nbytes + nbytes;
  if (chunk_nbytes(part) == 0) next_part();
  ring_->publish(info);
  return true;
}

MessageHeader Sender::make_header(const TransferState& transfer) const {
  const SendPart& part = transfer.to_send[part_index_];
  MessageHeader header;
  header.key = transfer.key;
  header.codec = part.codec;
  header.dtype = part.tensor.dtype;
  header.requires_grad = part.requires_grad;
  header.absent = part.absent;
  header.part_index = static_cast<std::uint16_t>(part_index_);
  header.num_parts = static_cast<std::uint16_t>(transfer.to_send.size());
  header.seq = next_seq_;
  header.shape = part.tensor.shape;
  header.payload_nbytes = part.absent ? 0 : part.tensor.nbytes();
  header.wire_nbytes = part.absent ? 0 : chunked_wire_nbytes(part.codec, part.tensor.dtype, part.tensor.shape);
  return header;
}

// Bytes of the next chunk of `part`; 0 when all of it is written.
std::size_t Sender::chunk_nbytes(const SendPart& part) const {
  if (part.absent || part.tensor.numel() == 0) return 0;
  if (part.codec.id == CodecId::raw) return std::min<std::size_t>(kChunkNbytes, part.tensor.nbytes() - position_);
  const Grid grid = grid_of(part.tensor.shape);
  const auto begin = static_cast<std::int64_t>(position_);
  if (begin >= num_groups(part.codec, grid)) return 0;
  return wire_nbytes(part.codec, grid, begin, groups_that_fit(part.codec, grid, begin, kChunkNbytes));
}

void Sender::write_chunk(const SendPart& part, std::byte* out, std::size_t nbytes) {
  if (nbytes == 0) return;
  if (part.codec.id == CodecId::raw) {
    std::memcpy(out, static_cast<const std::byte*>(part.tensor.data) + position_, nbytes);
    position_ += nbytes;
    return;
  }
  const Grid grid = grid_of(part.tensor.shape);
  const auto begin = static_cast<std::int64_t>(position_);
  const std::int64_t end = groups_that_fit(part.codec, grid, begin, kChunkNbytes);
  encode(part.codec, part.tensor.dtype, part.tensor.data, grid, begin, end, out);
  position_ = static_cast<std::uint64_t>(end);
}

RecordInfo Sender::stamp(std::size_t nbytes) {
  const std::int64_t now = now_ns();
  RecordInfo info{static_cast<std::uint32_t>(nbytes), now, now};
  if (!emulation_.is_on()) return info;
  info.sent_ns = std::max(now, link_free_ns_);
  const double seconds = emulation_.bytes_per_s > 0 ? static_cast<double>(nbytes) / emulation_.bytes_per_s : 0.0;
  link_free_ns_ = info.sent_ns + static_cast<std::int64_t>(seconds * 1e9);
  info.ready_ns = link_free_ns_ + static_cast<std::int64_t>(emulation_.latency_s * 1e9);
  return info;
}

void Sender::withdraw(const TransferPtr& transfer) {
  if (!queue_.empty() && queue_.front() == transfer && has_begun()) return;
  if (std::erase(queue_, transfer) > 0) transfer->release();
}

bool Sender::complain(std::uint64_t seq, const Error& error) {
  if (queue_.empty() || !has_begun() || first_seq_ != seq) return false;
  queue_.front()->complaint = error;
  return true;
}

}  // namespace pipecomm
