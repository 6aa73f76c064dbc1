// The kernels that write into memory of peers, for several members one after the other.

#include "megacore/cuda/peer_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "megacore/base/low_precision.h"
#include "megacore/moe/peer_exchange.h"
#include "megacore/moe/permutation.h"
#include "megacore/parallel/epochs.h"

namespace megacore {
namespace {

using cuda::FloatType;
using cuda::PeerView;

constexpr int64_t kMembers = 3;
constexpr int64_t kPeerExperts = 6;  // two of each member
constexpr int64_t kTokens = 9;
constexpr int64_t kChoices = 2;
constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

uint16_t stored_as(float value, uint16_t) { return base::bfloat16_bits(value); }
float stored_as(float value, float) { return value; }
float float_of(uint16_t bits) { return base::float_of_bfloat16(bits); }
float float_of(float value) { return value; }

template <typename Float>
struct Member {
  std::vector<Float> tokens, rows, sums;
  std::vector<float> probs, row_probs, prob_sums;
  std::vector<int64_t> experts, counts, row_map;
  std::vector<int64_t> shift, kept, m_splits, totals;
  std::vector<int32_t> workspace;
  int64_t num_arrived = 0;
};

// A group whose members' memory all lies here.
class Group {
 public:
  Group(int64_t capacity, int64_t max_row_bytes, double timeout_s = 60.0)
      : capacity_(capacity),
        layout_{.num_members = kMembers,
                .max_experts = kPeerExperts,
                .max_capacity = capacity,
                .max_row_bytes = max_row_bytes},
        timeout_ns_(static_cast<int64_t>(timeout_s * 1e9)),
        states_(kMembers) {
    const int64_t bytes = moe::peer_flags_bytes(kMembers) + layout_.bytes();
    for (int64_t p = 0; p < kMembers; ++p) {
      memory_.emplace_back(static_cast<size_t>(bytes + moe::kPeerAlignment));
      const auto address = reinterpret_cast<uintptr_t>(memory_.back().data());
      addresses_.push_back(memory_.back().data() +
                           (moe::kPeerAlignment - address % moe::kPeerAlignment));
    }
  }

  PeerView view(int64_t position) {
    return {.memory = addresses_.data(),
            .state = &states_[static_cast<size_t>(position)],
            .position = position,
            .layout = layout_,
            .timeout_ns = timeout_ns_};
  }
  moe::PeerShape shape(int64_t position) const {
    return {.num_members = kMembers,
            .position = position,
            .num_experts = kPeerExperts,
            .num_parts = kMembers,
            .part = position,
            .capacity = capacity_};
  }
  parallel::PeerFailure failure(int64_t position) const {
    return parallel::unpacked_failure(
        static_cast<int64_t>(states_[static_cast<size_t>(position)].failure));
  }
  int64_t capacity() const { return capacity_; }
  // Where a member's rows lie in a slot.
  std::byte* rows(int64_t position, int64_t slot) const {
    return addresses_[static_cast<size_t>(position)] + moe::peer_flags_bytes(kMembers) +
           layout_.rows_offset(slot);
  }

 private:
  int64_t capacity_;
  moe::PeerLayout layout_;
  int64_t timeout_ns_;
  std::vector<cuda::PeerState> states_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::byte*> addresses_;
};

template <typename Float>
std::vector<Member<Float>> random_members(int64_t width, int64_t capacity, std::mt19937& random) {
  std::vector<Member<Float>> members(kMembers);
  std::uniform_int_distribution<int64_t> any(-1, kPeerExperts - 1);
  std::normal_distribution<float> normal;
  for (Member<Float>& member : members) {
    member.counts.assign(kPeerExperts, 0);
    for (int64_t copy = 0; copy < kTokens * kChoices; ++copy) {
      member.experts.push_back(any(random));
      if (member.experts.back() >= 0) {
        ++member.counts[static_cast<size_t>(member.experts.back())];
      }
      member.probs.push_back(normal(random));
    }
    for (int64_t i = 0; i < kTokens * width; ++i) {
      member.tokens.push_back(stored_as(normal(random), Float{}));
    }
    member.shift.assign(kPeerExperts, -99);
    member.kept.assign(kPeerExperts, -99);
    member.m_splits.assign(kPeerExperts / kMembers, -99);
    member.totals.assign(3, -99);
    member.workspace.assign(
        static_cast<size_t>(cuda::peer_sort_numel(kTokens, kChoices, kPeerExperts)), -99);
    member.rows.assign(static_cast<size_t>(capacity * width), stored_as(kPoison, Float{}));
    member.sums.assign(member.tokens.size(), stored_as(kPoison, Float{}));
    member.row_probs.assign(static_cast<size_t>(capacity), kPoison);
    member.prob_sums.assign(member.probs.size(), kPoison);
  }
  return members;
}

template <typename Float>
cuda::PeerChoices choices_of(Member<Float>& member) {
  return {.experts = member.experts.data(),
          .num_tokens = kTokens,
          .num_choices = kChoices,
          .workspace = member.workspace.data()};
}

template <typename Float>
moe::PeerPlan plan_of(Member<Float>& member) {
  return {.num_copies = kTokens * kChoices,
          .shift = member.shift.data(),
          .kept = member.kept.data(),
          .m_splits = member.m_splits.data(),
          .totals = member.totals.data()};
}

// Exchanges counts and writes the row maps. With `sorts`, the kernels sort the choices.
template <typename Float>
void plan(Group& group, std::vector<Member<Float>>& members, bool sorts = true) {
  for (int64_t p = 0; p < kMembers; ++p) {
    Member<Float>& member = members[static_cast<size_t>(p)];
    if (sorts) {
      cuda::peer_send_counts(group.view(p), group.shape(p), choices_of(member), nullptr);
    } else {
      cuda::peer_send_sums(group.view(p), group.shape(p), member.counts.data(), nullptr);
    }
  }
  const std::vector<int64_t> owners = {0, 1, 2};
  for (int64_t p = 0; p < kMembers; ++p) {
    Member<Float>& member = members[static_cast<size_t>(p)];
    cuda::peer_plan(group.view(p), group.shape(p), plan_of(member), nullptr);
    const auto sum = [](const std::vector<int64_t>& values) {
      return std::accumulate(values.begin(), values.end(), int64_t{0});
    };
    const int64_t kept = sum(member.kept);
    EXPECT_EQ(member.totals, (std::vector<int64_t>{sum(member.m_splits), kTokens * kChoices - kept,
                                                   sum(member.counts) - kept}));
    member.num_arrived = member.totals[0];
    std::vector<int64_t> sorted(member.experts.size()), counts(kPeerExperts);
    moe::sort_by_expert(member.experts.data(), std::ssize(sorted), kPeerExperts, sorted.data(),
                        counts.data());
    moe::PeerRouting routing = {.experts = member.experts.data(),
                                .sorted = sorted.data(),
                                .shift = member.shift.data(),
                                .members = owners.data(),
                                .num_tokens = kTokens,
                                .num_choices = kChoices,
                                .num_experts = kPeerExperts,
                                .num_parts = kMembers,
                                .repeats = 1,
                                .capacity = group.capacity()};
    std::vector<int64_t> expected(member.experts.size(), -99);
    moe::map_copies(routing, expected.data());
    member.row_map.assign(member.experts.size(), -99);
    std::vector<int64_t> order = sorts ? std::vector<int64_t>(sorted.size(), -99) : sorted;
    routing.sorted = nullptr;
    cuda::peer_map_copies(routing, order.data(), sorts ? member.workspace.data() : nullptr,
                          member.row_map.data(), nullptr);
    ASSERT_EQ(member.row_map, expected);
    ASSERT_EQ(order, sorted);
  }
}

// Rows that travel to `receiver`, of all members.
template <typename Float>
int64_t num_travelling(const std::vector<Member<Float>>& members,
                       int64_t receiver,
                       int64_t capacity) {
  int64_t count = 0;
  for (const Member<Float>& member : members) {
    for (const int64_t entry : member.row_map) {
      count += entry >= 0 && entry / capacity == receiver ? 1 : 0;
    }
  }
  return count;
}

// What must lie in each member's buffer: (sender, copy) by row, from a list of all copies.
template <typename Float>
std::vector<std::vector<std::pair<int64_t, int64_t>>> by_list(
    const std::vector<Member<Float>>& members, int64_t capacity) {
  std::vector<std::vector<std::pair<int64_t, int64_t>>> rows(kMembers);
  for (int64_t expert = 0; expert < kPeerExperts; ++expert) {
    for (int64_t sender = 0; sender < kMembers; ++sender) {
      for (int64_t copy = 0; copy < kTokens * kChoices; ++copy) {
        auto& buffer = rows[static_cast<size_t>(expert / 2)];
        const auto& experts = members[static_cast<size_t>(sender)].experts;
        if (experts[static_cast<size_t>(copy)] == expert && std::ssize(buffer) < capacity) {
          buffer.emplace_back(sender, copy);
        }
      }
    }
  }
  return rows;
}

cuda::PeerTensor tensor(auto& rows, std::vector<float>& probs, int64_t width) {
  using Float = typename std::remove_reference_t<decltype(rows)>::value_type;
  return {.rows = rows.data(),
          .probs = probs.data(),
          .width = width,
          .type = sizeof(Float) == 4 ? FloatType::kFloat32 : FloatType::kBfloat16};
}

template <typename Float>
cuda::PeerCopies copies(const Member<Float>& member, int64_t capacity) {
  return {.rows = member.row_map.data(),
          .num_tokens = kTokens,
          .num_choices = kChoices,
          .capacity = capacity};
}

// Member 1 writes its rows to the slot itself, as a product does; the others have them copied.
template <typename Float>
void publish(Group& group, Member<Float>& member, int64_t position, int64_t slot, int64_t width) {
  cuda::PeerTensor rows = tensor(member.rows, member.row_probs, width);
  cuda::peer_reserve_pull(group.view(position), slot, nullptr);
  if (position == 1) {
    std::memcpy(group.rows(position, slot), rows.rows,
                static_cast<size_t>(member.num_arrived * width) * sizeof(Float));
    rows.rows = nullptr;
  }
  cuda::peer_start_pull(group.view(position), slot, rows, &member.num_arrived, group.capacity(),
                        nullptr);
}

template <typename Float>
void push_and_pull(Group& group, std::vector<Member<Float>>& members, int64_t width) {
  for (int64_t p = 0; p < kMembers; ++p) {
    Member<Float>& member = members[static_cast<size_t>(p)];
    cuda::peer_start_push(group.view(p), 0, tensor(member.tokens, member.probs, width),
                          copies(member, group.capacity()), nullptr);
  }
  for (int64_t p = 0; p < kMembers; ++p) {
    Member<Float>& member = members[static_cast<size_t>(p)];
    cuda::peer_finish_push(group.view(p), 0, tensor(member.rows, member.row_probs, width),
                           &member.num_arrived, group.capacity(), nullptr);
  }
  for (int64_t p = 0; p < kMembers; ++p) {
    publish(group, members[static_cast<size_t>(p)], p, 1, width);
  }
  for (int64_t p = 0; p < kMembers; ++p) {
    Member<Float>& member = members[static_cast<size_t>(p)];
    cuda::peer_finish_pull(group.view(p), 1, tensor(member.sums, member.prob_sums, width),
                           copies(member, group.capacity()), nullptr);
  }
}

template <typename Float>
void check(const std::vector<Member<Float>>& members, int64_t capacity, int64_t width) {
  const auto rows = by_list(members, capacity);
  for (int64_t p = 0; p < kMembers; ++p) {
    std::set<std::pair<int64_t, int64_t>> tokens;  // (sender, token)
    for (const auto& [sender, copy] : rows[static_cast<size_t>(p)]) {
      tokens.emplace(sender, copy / kChoices);
    }
    EXPECT_EQ(num_travelling(members, p, capacity), std::ssize(tokens));
  }
  std::vector<std::vector<bool>> is_kept(kMembers, std::vector<bool>(kTokens * kChoices));
  for (size_t p = 0; p < kMembers; ++p) {
    ASSERT_EQ(members[p].num_arrived, std::ssize(rows[p]));
    for (int64_t row = 0; row < capacity; ++row) {
      const bool is_filled = row < std::ssize(rows[p]);
      const auto [sender, copy] =
          is_filled ? rows[p][static_cast<size_t>(row)] : std::pair<int64_t, int64_t>{0, 0};
      const Member<Float>& from = members[static_cast<size_t>(sender)];
      const float prob = from.probs[static_cast<size_t>(copy)];
      for (int64_t i = 0; i < width; ++i) {
        const Float value = from.tokens[static_cast<size_t>(copy / kChoices * width + i)];
        const float found = float_of(members[p].rows[static_cast<size_t>(row * width + i)]);
        ASSERT_TRUE(is_filled ? found == float_of(value) : std::isnan(found)) << row;
      }
      const float found = members[p].row_probs[static_cast<size_t>(row)];
      EXPECT_TRUE(is_filled ? found == prob : std::isnan(found)) << row;
      if (is_filled) {
        is_kept[static_cast<size_t>(sender)][static_cast<size_t>(copy)] = true;
      }
    }
  }
  for (size_t p = 0; p < kMembers; ++p) {
    for (int64_t token = 0; token < kTokens; ++token) {
      float times = 0.0F;
      for (int64_t copy = token * kChoices; copy < (token + 1) * kChoices; ++copy) {
        const auto at = static_cast<size_t>(copy);
        times += is_kept[p][at] ? 1.0F : 0.0F;
        EXPECT_EQ(members[p].prob_sums[at], is_kept[p][at] ? members[p].probs[at] : 0.0F);
      }
      for (int64_t i = token * width; i < (token + 1) * width; ++i) {
        const auto at = static_cast<size_t>(i);
        // Twice a value is exact in any of the types.
        ASSERT_EQ(float_of(members[p].sums[at]), times * float_of(members[p].tokens[at]));
      }
    }
  }
}

template <typename Float>
void run_rounds(int64_t width) {
  std::mt19937 random(7);
  for (const int64_t capacity : {20, 11}) {
    SCOPED_TRACE(testing::Message() << "width " << width << ", capacity " << capacity);
    Group group(capacity, width * static_cast<int64_t>(sizeof(Float)));
    for (int round = 0; round < 2; ++round) {  // over the same memory, with no reset
      std::vector<Member<Float>> members = random_members<Float>(width, capacity, random);
      plan(group, members, round == 0);
      push_and_pull(group, members, width);
      check(members, capacity, width);
    }
    for (int64_t p = 0; p < kMembers; ++p) {
      EXPECT_EQ(group.failure(p).fault, parallel::PeerFault::kNone);
    }
  }
}

// Tokens of several tiles, with as many choices as do not divide a tile: against the CPU.
TEST(PeerKernels, SortAndMapTokensOfSeveralTiles) {
  for (const auto& [tokens, choices, experts] : {std::tuple{500, 6, 9}, std::tuple{1300, 1, 512},
                                                 std::tuple{0, 2, 3}, std::tuple{7, 0, 3}}) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens, " << choices << " choices");
    std::mt19937 random(3);
    std::uniform_int_distribution<int64_t> any(-1, experts - 1);
    std::vector<int64_t> chosen(static_cast<size_t>(tokens * choices));
    std::generate(chosen.begin(), chosen.end(), [&] { return any(random); });
    std::vector<int64_t> sorted(chosen.size()), counts(static_cast<size_t>(experts));
    moe::sort_by_expert(chosen.data(), std::ssize(chosen), experts, sorted.data(), counts.data());
    const moe::PeerLayout layout = {
        .num_members = 1, .max_experts = experts, .max_capacity = 900, .max_row_bytes = 16};
    const int64_t bytes = moe::peer_flags_bytes(1) + layout.bytes();
    std::vector<int64_t> memory(static_cast<size_t>(bytes / 8 + 1));
    std::byte* address = reinterpret_cast<std::byte*>(memory.data());
    cuda::PeerState state = {};
    const cuda::PeerView view = {
        .memory = &address, .state = &state, .layout = layout, .timeout_ns = 1000000000};
    const moe::PeerShape shape = {.num_experts = experts, .capacity = 900};
    std::vector<int32_t> workspace(
        static_cast<size_t>(cuda::peer_sort_numel(tokens, choices, experts)), -99);
    cuda::peer_send_counts(view, shape,
                           {.experts = chosen.data(),
                            .num_tokens = tokens,
                            .num_choices = choices,
                            .workspace = workspace.data()},
                           nullptr);
    std::vector<int64_t> shift(counts.size()), kept(counts.size()), m_splits(counts.size());
    std::vector<int64_t> totals(3);
    cuda::peer_plan(view, shape,
                    {.num_copies = tokens * choices,
                     .shift = shift.data(),
                     .kept = kept.data(),
                     .m_splits = m_splits.data(),
                     .totals = totals.data()},
                    nullptr);
    EXPECT_EQ(m_splits, kept);
    EXPECT_EQ(totals[2], std::max<int64_t>(
                             0, std::accumulate(counts.begin(), counts.end(), int64_t{0}) - 900));
    const std::vector<int64_t> owner = {0};
    moe::PeerRouting routing = {.experts = chosen.data(),
                                .sorted = sorted.data(),
                                .shift = shift.data(),
                                .members = owner.data(),
                                .num_tokens = tokens,
                                .num_choices = choices,
                                .num_experts = experts,
                                .capacity = 900};
    std::vector<int64_t> expected(chosen.size(), -99), map = expected, order = expected;
    moe::map_copies(routing, expected.data());
    cuda::peer_map_copies(routing, order.data(), workspace.data(), map.data(), nullptr);
    EXPECT_EQ(order, sorted);
    EXPECT_EQ(map, expected);
  }
}

TEST(PeerKernels, MoveWholePacks) { run_rounds<float>(48); }
TEST(PeerKernels, MoveSingleElements) { run_rounds<float>(5); }
TEST(PeerKernels, MoveBfloat16) { run_rounds<uint16_t>(40); }

TEST(PeerKernels, GiveUpOnAMemberThatDoesNotComeAndNameIt) {
  std::mt19937 random(7);
  Group group(20, 16, 0.05);
  std::vector<Member<float>> members = random_members<float>(4, 20, random);
  plan(group, members);
  for (const int64_t p : {0, 1}) {  // not member 2
    Member<float>& member = members[static_cast<size_t>(p)];
    const cuda::PeerTensor tokens = tensor(member.tokens, member.probs, 4);
    cuda::peer_start_push(group.view(p), 0, tokens, copies(member, 20), nullptr);
  }
  for (const int64_t p : {0, 1}) {
    Member<float>& member = members[static_cast<size_t>(p)];
    member.rows.assign(member.rows.size(), 1.0F);
    const cuda::PeerTensor rows = tensor(member.rows, member.row_probs, 4);
    cuda::peer_finish_push(group.view(p), 0, rows, &member.num_arrived, 20, nullptr);
    EXPECT_EQ(group.failure(p).fault, parallel::PeerFault::kNoRows);
    EXPECT_EQ(group.failure(p).member, 2);
    EXPECT_EQ(group.failure(p).epoch, 1U);
    for (int64_t i = 0; i < member.num_arrived * 4; ++i) {
      EXPECT_TRUE(std::isnan(member.rows[static_cast<size_t>(i)]));
    }
    for (int64_t i = 0; i < member.num_arrived; ++i) {
      EXPECT_TRUE(std::isnan(member.row_probs[static_cast<size_t>(i)]));
    }
  }
  // Exchanges that follow end at once, without a row and without a copy blamed on a full buffer.
  Member<float>& first = members[0];
  cuda::peer_send_counts(group.view(0), group.shape(0), choices_of(first), nullptr);
  cuda::peer_plan(group.view(0), group.shape(0), plan_of(first), nullptr);
  EXPECT_EQ(group.failure(0).fault, parallel::PeerFault::kNoRows);
  EXPECT_EQ(first.kept, first.counts);
  EXPECT_EQ(first.shift, std::vector<int64_t>(kPeerExperts, 20));
  EXPECT_EQ(first.m_splits, std::vector<int64_t>(kPeerExperts / kMembers, 0));
  EXPECT_EQ(first.totals[0], 0);
  EXPECT_EQ(first.totals[2], 0);
}

// Two microbatches in turns: the rows of one are pulled while those of the other are pushed.
TEST(PeerKernels, PullInOneSlotWhileTheOtherIsPushedTo) {
  std::mt19937 random(7);
  Group group(20, 32);
  std::vector<Member<float>> first = random_members<float>(8, 20, random);
  std::vector<Member<float>> second = random_members<float>(8, 20, random);
  const auto start_push = [&](std::vector<Member<float>>& members, int64_t p, int64_t slot) {
    Member<float>& member = members[static_cast<size_t>(p)];
    cuda::peer_start_push(group.view(p), slot, tensor(member.tokens, member.probs, 8),
                          copies(member, 20), nullptr);
  };
  const auto finish_push = [&](std::vector<Member<float>>& members, int64_t p, int64_t slot) {
    Member<float>& member = members[static_cast<size_t>(p)];
    cuda::peer_finish_push(group.view(p), slot, tensor(member.rows, member.row_probs, 8),
                           &member.num_arrived, 20, nullptr);
  };
  const auto finish_pull = [&](std::vector<Member<float>>& members, int64_t p, int64_t slot) {
    Member<float>& member = members[static_cast<size_t>(p)];
    cuda::peer_finish_pull(group.view(p), slot, tensor(member.sums, member.prob_sums, 8),
                           copies(member, 20), nullptr);
  };
  plan(group, first);
  plan(group, second);
  for (int64_t p = 0; p < kMembers; ++p) {
    start_push(first, p, 0);
  }
  for (int64_t p = 0; p < kMembers; ++p) {
    finish_push(first, p, 0);
  }
  for (int64_t p = 0; p < kMembers; ++p) {
    publish(group, first[static_cast<size_t>(p)], p, 1, 8);
    start_push(second, p, 0);
  }
  for (int64_t p = kMembers - 1; p >= 0; --p) {
    finish_pull(first, p, 1);
    finish_push(second, p, 0);
  }
  for (int64_t p = 0; p < kMembers; ++p) {
    publish(group, second[static_cast<size_t>(p)], p, 1, 8);
  }
  for (int64_t p = 0; p < kMembers; ++p) {
    finish_pull(second, p, 1);
  }
  check(first, 20, 8);
  check(second, 20, 8);
}

TEST(PeerKernels, ReserveNoSlotThatAMemberStillReads) {
  std::mt19937 random(7);
  Group group(20, 16, 0.05);
  std::vector<Member<float>> members = random_members<float>(4, 20, random);
  plan(group, members);
  for (int64_t p = 0; p < kMembers; ++p) {
    members[static_cast<size_t>(p)].num_arrived = 0;
    publish(group, members[static_cast<size_t>(p)], p, 0, 4);
  }
  const auto finish = [&](int64_t p) {
    Member<float>& member = members[static_cast<size_t>(p)];
    cuda::peer_finish_pull(group.view(p), 0, tensor(member.sums, member.prob_sums, 4),
                           copies(member, 20), nullptr);
  };
  for (const int64_t p : {0, 1}) {  // not member 2
    finish(p);
  }
  cuda::peer_reserve_pull(group.view(0), 0, nullptr);
  EXPECT_EQ(group.failure(0).fault, parallel::PeerFault::kStillReads);
  EXPECT_EQ(group.failure(0).member, 2);
  finish(2);
  cuda::peer_reserve_pull(group.view(1), 0, nullptr);
  EXPECT_EQ(group.failure(1).fault, parallel::PeerFault::kNone);
}

TEST(PeerKernels, RefuseAnotherCapacity) {
  std::mt19937 random(7);
  Group group(20, 16);
  std::vector<Member<float>> members = random_members<float>(4, 20, random);
  for (int64_t p = 0; p < kMembers; ++p) {
    moe::PeerShape shape = group.shape(p);
    shape.capacity -= p == 1 ? 1 : 0;
    cuda::peer_send_counts(group.view(p), shape, choices_of(members[static_cast<size_t>(p)]),
                           nullptr);
  }
  Member<float>& first = members[0];
  cuda::peer_plan(group.view(0), group.shape(0), plan_of(first), nullptr);
  EXPECT_EQ(group.failure(0).fault, parallel::PeerFault::kOtherCapacity);
  EXPECT_EQ(group.failure(0).member, 1);
}

TEST(PeerKernels, RefuseWhatDoesNotFitTheMemory) {
  Group group(20, 16);
  std::vector<float> row(8);
  const cuda::PeerTensor wide = {.rows = row.data(), .width = 8};
  EXPECT_THROW(cuda::peer_start_push(group.view(0), 0, wide, {.capacity = 20}, nullptr),
               std::invalid_argument);
  const cuda::PeerTensor fits = {.rows = row.data(), .width = 4};
  EXPECT_THROW(cuda::peer_start_push(group.view(0), 2, fits, {.capacity = 20}, nullptr),
               std::invalid_argument);
  EXPECT_THROW(cuda::peer_reserve_pull(group.view(0), 2, nullptr), std::invalid_argument);
  EXPECT_THROW(cuda::peer_start_push(group.view(0), 0, fits, {.capacity = 21}, nullptr),
               std::invalid_argument);
}

}  // namespace
}  // namespace megacore
