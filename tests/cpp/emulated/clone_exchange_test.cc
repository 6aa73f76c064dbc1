// The kernels that bring clones and collect their gradients, for several ranks one after the other.

#include "megacore/cuda/clone_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "megacore/parallel/epochs.h"

namespace megacore {
namespace {

using cuda::CloneView;
using parallel::PeerFault;

constexpr int64_t kRanks = 3;
constexpr int64_t kSlots = 2;
constexpr int64_t kExperts = 6;
constexpr int64_t kLocal = kExperts / kRanks;
constexpr int64_t kGrads = 33000;  // by float4, more than 31 blocks of 256 threads
constexpr int64_t kWeightBytes[moe::kProjections] = {1600, 10};  // by 16 bytes, and not
constexpr float kOld = 3.0F;                                     // in the gradients' sum before

using Table = std::vector<int64_t>;  // expert by (rank, slot)
const Table kFirstTable = {2, 5, 0, -1, 0, 3};
const Table kOtherTable = {-1, -1, 4, 0, 3, 1};

std::byte weight(int64_t step, int64_t projection, int64_t expert, int64_t byte) {
  return static_cast<std::byte>(step * 101 + projection * 53 + expert * 7 + byte);
}
// Sums of these depend on their order.
float grad(int64_t step, int64_t projection, int64_t index, int64_t i) {
  return std::sin(static_cast<float>(step * 31 + projection * 17 + index * 5 + i)) / 3.0F;
}

// Ranks whose memory all lies here.
class Ranks {
 public:
  explicit Ranks(double timeout_s = 60.0, int64_t num_grads = kGrads)
      : layout_{.num_slots = kSlots,
                .weight_bytes = {kWeightBytes[0], kWeightBytes[1]},
                .grad_bytes = {num_grads * 4, num_grads * 4}},
        timeout_ns_(static_cast<int64_t>(timeout_s * 1e9)),
        failures_(kRanks) {
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      memory_.emplace_back(static_cast<size_t>(layout_.bytes(kRanks) + moe::kBoardAlignment));
      const auto address = reinterpret_cast<uintptr_t>(memory_.back().data());
      addresses_.push_back(memory_.back().data() +
                           (moe::kBoardAlignment - address % moe::kBoardAlignment));
    }
  }

  CloneView view(int64_t rank, const Table& table) {
    return {.memory = addresses_.data(),
            .failure = &failures_[static_cast<size_t>(rank)],
            .layout = layout_,
            .table = {.slot_expert = table.data(),
                      .num_ranks = kRanks,
                      .num_slots = kSlots,
                      .num_experts = kExperts,
                      .position = rank},
            .timeout_ns = timeout_ns_};
  }
  std::byte* weights(int64_t index, int64_t projection) const {
    return addresses_[static_cast<size_t>(index / kSlots)] +
           layout_.weights_offset(kRanks, projection) +
           index % kSlots * layout_.weight_bytes[projection];
  }
  float* grads(int64_t index, int64_t projection) const {
    return reinterpret_cast<float*>(addresses_[static_cast<size_t>(index / kSlots)] +
                                    layout_.grads_offset(kRanks, projection)) +
           index % kSlots * kGrads;
  }
  parallel::PeerFailure failure(int64_t rank) const {
    return parallel::unpacked_failure(static_cast<int64_t>(failures_[static_cast<size_t>(rank)]));
  }

 private:
  moe::CloneLayout layout_;
  int64_t timeout_ns_;
  std::vector<unsigned long long> failures_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::byte*> addresses_;
};

std::vector<std::byte> home_weights(int64_t step, int64_t projection, int64_t rank) {
  std::vector<std::byte> weights;
  for (int64_t expert = rank * kLocal; expert < (rank + 1) * kLocal; ++expert) {
    for (int64_t byte = 0; byte < kWeightBytes[projection]; ++byte) {
      weights.push_back(weight(step, projection, expert, byte));
    }
  }
  return weights;
}

void bring(Ranks& ranks, const Table& table, int64_t step) {
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    cuda::clones_open(ranks.view(rank, table), nullptr);
  }
  for (int64_t projection = 0; projection < moe::kProjections; ++projection) {
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      const std::vector<std::byte> weights = home_weights(step, projection, rank);
      cuda::clones_push(ranks.view(rank, table), projection, weights.data(), nullptr);
    }
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      cuda::clones_wait(ranks.view(rank, table), projection, nullptr);
    }
  }
}

std::vector<std::byte> in_slot(const Ranks& ranks, int64_t index, int64_t projection) {
  const std::byte* begin = ranks.weights(index, projection);
  return {begin, begin + kWeightBytes[projection]};
}

// What lies in each slot must be its expert of this step, or what lay there `before`.
void check_weights(const Ranks& ranks,
                   const Table& table,
                   int64_t step,
                   const std::vector<std::vector<std::byte>>& before) {
  for (int64_t place = 0; place < std::ssize(before); ++place) {
    const int64_t index = place / moe::kProjections;
    const int64_t projection = place % moe::kProjections;
    const int64_t expert = table[static_cast<size_t>(index)];
    std::vector<std::byte> expected = before[static_cast<size_t>(place)];
    for (int64_t byte = 0; expert >= 0 && byte < kWeightBytes[projection]; ++byte) {
      expected[static_cast<size_t>(byte)] = weight(step, projection, expert, byte);
    }
    ASSERT_EQ(in_slot(ranks, index, projection), expected) << "slot " << index;
  }
}

std::vector<std::vector<std::byte>> in_all_slots(const Ranks& ranks) {
  std::vector<std::vector<std::byte>> found;
  for (int64_t place = 0; place < kRanks * kSlots * moe::kProjections; ++place) {
    found.push_back(in_slot(ranks, place / moe::kProjections, place % moe::kProjections));
  }
  return found;
}

void collect_and_check(Ranks& ranks, const Table& table, int64_t step, int64_t projection) {
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    cuda::clones_reserve_grads(ranks.view(rank, table), projection, nullptr);
  }
  for (int64_t index = 0; index < kRanks * kSlots; ++index) {
    for (int64_t i = 0; i < kGrads; ++i) {
      ranks.grads(index, projection)[i] = grad(step, projection, index, i);
    }
  }
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    cuda::clones_offer_grads(ranks.view(rank, table), projection, nullptr);
  }
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    // A sum that is not aligned to float4 is added by single floats.
    const int64_t shift = rank == 1 ? 1 : 0;
    std::vector<float> total(static_cast<size_t>(kLocal * kGrads + shift), kOld);
    std::vector<float> expected = total;
    for (int64_t index = 0; index < kRanks * kSlots; ++index) {
      const int64_t local = table[static_cast<size_t>(index)] - rank * kLocal;
      for (int64_t i = 0; local >= 0 && local < kLocal && i < kGrads; ++i) {
        expected[static_cast<size_t>(shift + local * kGrads + i)] +=
            grad(step, projection, index, i);
      }
    }
    cuda::clones_collect(ranks.view(rank, table), projection, total.data() + shift, nullptr);
    ASSERT_EQ(total, expected) << "rank " << rank;
  }
}

TEST(CloneKernels, BringWeightsAndCollectGradientsWithChangingTables) {
  Ranks ranks;
  for (int64_t step = 0; step < 3; ++step) {
    const Table& table = step % 2 == 0 ? kFirstTable : kOtherTable;
    const std::vector<std::vector<std::byte>> before = in_all_slots(ranks);
    bring(ranks, table, step);
    check_weights(ranks, table, step, before);
    for (int64_t projection = 0; projection < moe::kProjections; ++projection) {
      collect_and_check(ranks, table, step, projection);
    }
  }
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(ranks.failure(rank).fault, PeerFault::kNone);
  }
}

// Pipelines that overlap two microbatches push the weights of one on a side stream while they
// collect the gradients of the other.
TEST(CloneKernels, WeightsArePushedWhileGradientsAreCollected) {
  Ranks ranks;
  const Table& table = kFirstTable;
  bring(ranks, table, 0);
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    cuda::clones_reserve_grads(ranks.view(rank, table), 0, nullptr);
  }
  for (int64_t index = 0; index < kRanks * kSlots; ++index) {
    for (int64_t i = 0; i < kGrads; ++i) {
      ranks.grads(index, 0)[i] = grad(0, 0, index, i);
    }
  }
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    cuda::clones_offer_grads(ranks.view(rank, table), 0, nullptr);
  }
  // Rank 0 fills slot 2 (of rank 1) and then waits for rank 2, which has not opened slot 4.
  cuda::clones_open(ranks.view(0, table), nullptr);
  cuda::clones_open(ranks.view(1, table), nullptr);
  const std::vector<std::byte> weights = home_weights(1, 0, 0);
  std::jthread push([&] { cuda::clones_push(ranks.view(0, table), 0, weights.data(), nullptr); });
  while (in_slot(ranks, 2, 0).back() != weights[static_cast<size_t>(kWeightBytes[0]) - 1]) {
    std::this_thread::yield();
  }
  // Rank 1 reuses its gradients as soon as rank 0 says that it has read them.
  std::jthread reuse([&] {
    cuda::clones_reserve_grads(ranks.view(1, table), 0, nullptr);
    std::fill_n(ranks.grads(2, 0), kGrads, 1e9F);
  });
  std::vector<float> total(kLocal * kGrads, kOld);
  cuda::clones_collect(ranks.view(0, table), 0, total.data(), nullptr);
  for (int64_t i = 0; i < kGrads; ++i) {
    ASSERT_EQ(total[static_cast<size_t>(i)], kOld + grad(0, 0, 2, i) + grad(0, 0, 4, i)) << i;
  }
  cuda::clones_open(ranks.view(2, table), nullptr);
  push.join();
  EXPECT_EQ(in_slot(ranks, 4, 0), in_slot(ranks, 2, 0));
}

TEST(CloneKernels, RankThatDoesNotOpenIsNamedAndKeepsItsSlots) {
  Ranks ranks(0.05);
  cuda::clones_open(ranks.view(0, kFirstTable), nullptr);
  cuda::clones_open(ranks.view(1, kFirstTable), nullptr);
  const std::vector<std::byte> weights = home_weights(0, 0, 0);
  // Expert 0 has clones on ranks 1 and 2.
  cuda::clones_push(ranks.view(0, kFirstTable), 0, weights.data(), nullptr);
  EXPECT_EQ(ranks.failure(0).fault, PeerFault::kStillReads);
  EXPECT_EQ(ranks.failure(0).member, 2);
  EXPECT_EQ(in_slot(ranks, 2, 0)[1], weight(0, 0, 0, 1));
  EXPECT_EQ(in_slot(ranks, 4, 0), std::vector<std::byte>(kWeightBytes[0]));
}

TEST(CloneKernels, RankThatPushesNothingIsNamedAndGradientsAreNan) {
  Ranks ranks(0.05);
  cuda::clones_open(ranks.view(0, kFirstTable), nullptr);
  cuda::clones_wait(ranks.view(0, kFirstTable), 1, nullptr);
  EXPECT_EQ(ranks.failure(0).fault, PeerFault::kNoRows);
  EXPECT_TRUE(ranks.failure(0).member == 1 || ranks.failure(0).member == 2);
  std::vector<float> total(kLocal * kGrads, kOld);
  cuda::clones_collect(ranks.view(0, kFirstTable), 0, total.data(), nullptr);
  EXPECT_TRUE(std::isnan(total[0]));
}

TEST(CloneKernels, SetWithoutGradientsKeepsItsWeightsAndFailsTheOther) {
  Ranks first(0.05);
  Ranks second(0.05, 0);
  const std::vector<std::vector<std::byte>> before = in_all_slots(first);
  for (int64_t step = 0; step < 2; ++step) {
    bring(first, kFirstTable, step);
    bring(second, kOtherTable, step + 5);
    collect_and_check(first, kFirstTable, step, 1);
    check_weights(first, kFirstTable, step, before);
    check_weights(second, kOtherTable, step + 5, before);
  }
  CloneView view = second.view(2, kOtherTable);
  view.failure = first.view(2, kFirstTable).failure;
  cuda::clones_open(view, nullptr);
  cuda::clones_wait(view, 0, nullptr);
  EXPECT_EQ(first.failure(2).fault, PeerFault::kNoRows);
  std::vector<float> total(kLocal * kGrads, kOld);
  cuda::clones_collect(first.view(2, kFirstTable), 0, total.data(), nullptr);
  EXPECT_TRUE(std::isnan(total[0]));
}

TEST(CloneKernels, WrongArgumentsAreNamed) {
  Ranks ranks;
  CloneView view = ranks.view(0, kFirstTable);
  EXPECT_THROW(cuda::clones_wait(view, moe::kProjections, nullptr), std::invalid_argument);
  view.table.num_slots = kSlots + 1;
  EXPECT_THROW(cuda::clones_open(view, nullptr), std::invalid_argument);
  view = ranks.view(0, kFirstTable);
  view.layout.weight_bytes[0] = 7;
  EXPECT_THROW(cuda::clones_push(view, 0, nullptr, nullptr), std::invalid_argument);
}

}  // namespace
}  // namespace megacore
