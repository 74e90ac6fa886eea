// Messages that wait to leave, in the order in which they are to. Progress lock only.
#pragma once

#include <algorithm>
#include <deque>
#include <utility>

#include "transport/matching/transfer.h"

namespace pipecomm {

class SendQueue {
 public:
  // Activation gradients overtake what has not begun to leave.
  explicit SendQueue(bool backward_first) : backward_first_(backward_first) {}

  // `has_begun`: the first one has, and is not overtaken.
  void post(TransferPtr transfer, bool has_begun) {
    auto place = waiting_.end();
    if (backward_first_ && transfer->key.direction == Direction::backward) {
      const auto may_overtake = [](const TransferPtr& other) { return other->key.direction != Direction::backward; };
      place = std::find_if(waiting_.begin() + (has_begun ? 1 : 0), waiting_.end(), may_overtake);
    }
    waiting_.insert(place, std::move(transfer));
  }

  bool empty() const { return waiting_.empty(); }
  std::size_t size() const { return waiting_.size(); }
  const TransferPtr& front() const { return waiting_.front(); }
  const TransferPtr& operator[](std::size_t index) const { return waiting_[index]; }
  void pop_front() { waiting_.pop_front(); }
  // False where it does not wait here.
  bool remove(const TransferPtr& transfer) { return std::erase(waiting_, transfer) > 0; }
  // Takes out those for which the predicate, given the message and its index, holds.
  template <typename Predicate>
  void remove_if(Predicate&& predicate) {
    std::deque<TransferPtr> kept;
    for (std::size_t i = 0; i < waiting_.size(); ++i) {
      if (!predicate(waiting_[i], i)) kept.push_back(waiting_[i]);
    }
    waiting_ = std::move(kept);
  }
  auto begin() const { return waiting_.begin(); }
  auto end() const { return waiting_.end(); }

 private:
  const bool backward_first_;
  std::deque<TransferPtr> waiting_;
};

}  // namespace pipecomm
