// The lists of a schedule: what is refused, where sends and receives go, and who waits for whom.
#include <array>
#include <cstdint>
#include <vector>

#include "check.h"
#include "schedule/check.h"
#include "schedule/lowering.h"
#include "schedule/walk.h"

using namespace pipecomm::schedule;

namespace {

enum : std::int32_t { F, B, SEND_F, RECV_F, SEND_B, RECV_B };

const std::array<KindTraits, 6> kKinds = {{
    {KindTraits::compute, 0, 0, 0},
    {KindTraits::compute, 1, 1 << F, 0},
    {KindTraits::send, 0, 0, 0},
    {KindTraits::receive, 0, 0, 0},
    {KindTraits::send, 1, 0, 0},
    {KindTraits::receive, 1, 0, 0},
}};

// Two stages on two ranks.
struct Example {
  std::vector<Action> actions;
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> rank_of{0, 1};
  std::vector<std::int32_t> before{-1, 0}, after{1, -1};
  std::vector<double> compute_s = std::vector<double>(kKinds.size() * 2, 1.0);
  std::vector<double> transfer_s{2.0, 2.0}, latency_s{0.5, 0.5};

  Lists lists() const {
    Lists lists;
    lists.rows = {actions, offsets};
    lists.kinds = kKinds;
    lists.ways.rank_of = rank_of;
    lists.ways.source[0] = lists.ways.target[1] = before;
    lists.ways.target[0] = lists.ways.source[1] = after;
    lists.sends[0] = SEND_F;
    lists.receives[0] = RECV_F;
    lists.sends[1] = SEND_B;
    lists.receives[1] = RECV_B;
    return lists;
  }
  Timing timing() const {
    Timing timing;
    timing.compute_s = compute_s;
    for (int direction = 0; direction < kNumDirections; ++direction) {
      timing.transfer_s[direction] = transfer_s;
      timing.latency_s[direction] = latency_s;
    }
    return timing;
  }
};

Example one_microbatch() { return {{{F, 0, 0}, {B, 0, 0}, {F, 1, 0}, {B, 1, 0}}, {0, 2, 4}}; }

TEST(complete_lists_have_no_fault) {
  const Example example = one_microbatch();
  CHECK(!find_fault(example.lists(), 2, 1));
  CHECK(!find_misorder(example.lists()));
}

TEST(faults_are_named_by_rule_and_place) {
  Example example = one_microbatch();
  example.actions[3] = {F, 1, 0};
  CHECK_EQ(find_fault(example.lists(), 2, 1)->rule, Fault::twice);
  CHECK_EQ(find_fault(example.lists(), 2, 1)->index, 3);
  example.actions[2] = {B, 1, 0};
  CHECK_EQ(find_fault(example.lists(), 2, 1)->rule, Fault::too_early);
  example.actions[2] = {F, 0, 0};
  CHECK_EQ(find_fault(example.lists(), 2, 1)->rule, Fault::second_rank);
  example.actions[0] = {SEND_F, 0, 0};
  CHECK_EQ(find_fault(example.lists(), 2, 1)->rule, Fault::not_compute);
  example.actions[0] = {F, 0, 1 << 30};
  CHECK_EQ(find_fault(example.lists(), 2, 1)->rule, Fault::wrong_microbatch);
}

TEST(enormous_numbers_need_no_enormous_table) {
  const Example example{{{F, 2147483000, 2147483000}}, {0, 1}};
  CHECK(!find_fault(example.lists(), 2147483647, 2147483647));
}

TEST(messages_used_in_another_order_are_found) {
  const Example example{{{F, 0, 0}, {F, 0, 1}, {F, 1, 1}, {F, 1, 0}}, {0, 2, 4}};
  const auto found = find_misorder(example.lists());
  CHECK(found.has_value());
  CHECK_EQ(found->index, 2);
  CHECK_EQ(found->sent_index, 0);
  CHECK_EQ(found->num_used, 0);
}

TEST(sends_follow_and_receives_come_one_message_ahead) {
  const Example example = one_microbatch();
  const Lowered lowered = lower(example.lists());
  std::vector<std::int32_t> kinds;
  for (const Action& action : lowered.actions) kinds.push_back(action.kind);
  CHECK((kinds == std::vector<std::int32_t>{RECV_B, F, SEND_F, B, RECV_F, F, B, SEND_B}));
  CHECK((lowered.offsets == std::vector<std::int64_t>{0, 4, 8}));
}

TEST(walk_waits_for_transfers_and_latency) {
  const Example example = one_microbatch();
  const Walk walked = walk(example.lists(), example.timing(), nullptr);
  CHECK(walked.stuck_at.empty());
  // F 0 to 1, on its way to 3.5, F and B to 5.5, on its way to 8, B to 9.
  CHECK_EQ(walked.clock_s[0], 9.0);
  CHECK_EQ(walked.clock_s[1], 5.5);
  CHECK_EQ(walked.exposed_comm_s[0], 2.5);
  CHECK_EQ(walked.start_s[3], 4.5);
  CHECK_EQ(walked.sends.size(), 2u);
}

TEST(walk_says_where_ranks_wait_for_ever) {
  const Example example{{{F, 0, 0}, {B, 0, 0}, {F, 0, 1}, {B, 0, 1}, {F, 1, 0}, {F, 1, 1}, {B, 1, 0}, {B, 1, 1}},
                        {0, 4, 8}};
  const Walk walked = walk(example.lists(), example.timing(), nullptr);
  CHECK((walked.stuck_at == std::vector<std::int64_t>{4, 3}));
}

}  // namespace

CHECK_MAIN()
