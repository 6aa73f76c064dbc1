// The set-up kernel of grouped products, run on the CPU thread by thread: it writes what its twin
// does, and clears exactly what no product writes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "megacore/cuda/grouped_gemm.h"
#include "megacore/moe/grouped_arguments.h"

namespace megacore::cuda {
namespace {

using moe::GroupedProduct;

constexpr int64_t kOut = 16, kIn = 48;
constexpr int64_t kTail = 5;  // rows of nobody
constexpr uint8_t kPoison = 0xEE;

struct alignas(moe::kGroupedAlignment) Line {
  uint8_t bytes[moe::kGroupedAlignment];
};

// Memory of whole lines, filled with poison.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : lines_(static_cast<size_t>(bytes / moe::kGroupedAlignment) + 1), numel_(bytes) {
    std::memset(lines_.data(), kPoison, lines_.size() * sizeof(Line));
  }
  uint8_t* data() { return lines_.front().bytes; }
  std::vector<uint8_t> bytes() { return {data(), data() + numel_}; }

 private:
  std::vector<Line> lines_;
  int64_t numel_;
};

std::vector<int64_t> random_counts(int64_t num_experts, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int64_t> some(-1, 6);
  std::vector<int64_t> counts(static_cast<size_t>(num_experts));
  std::generate(counts.begin(), counts.end(), [&] { return std::max<int64_t>(0, some(random)); });
  return counts;
}

int64_t sum_of(const std::vector<int64_t>& counts) {
  int64_t sum = 0;
  for (const int64_t count : counts) {
    sum += count;
  }
  return sum;
}

struct Case {
  GroupedProduct product;
  std::vector<int64_t> counts;
  int64_t first_row = 0;
  bool accumulate = false;
  std::vector<uint8_t> mask = {};
  bool is_scaled = false;  // factors of 8 bits
  bool without_counts = false;
};

GroupedGemmParams params_of(const Case& c, Memory& result, Memory& workspace) {
  const bool is_weight = c.product == GroupedProduct::kWeightGrad;
  GroupedGemmParams params;
  params.product = c.product;
  params.a = params.b = reinterpret_cast<const void*>(uintptr_t{1} << 20);  // never followed
  if (c.is_scaled) {
    params.operand = GroupedType::kFloat8;
    params.a_scale = reinterpret_cast<const float*>(uintptr_t{1} << 21);
    params.b_scale = reinterpret_cast<const float*>(uintptr_t{1} << 22);
  }
  params.m_splits = c.without_counts ? nullptr : c.counts.data();
  params.d = result.data();
  params.result = is_weight ? GroupedType::kFloat32 : GroupedType::kBFloat16;
  params.num_rows = c.first_row + sum_of(c.counts) + (c.without_counts ? 0 : kTail);
  params.num_experts = static_cast<int64_t>(c.counts.size());
  params.out_features = kOut;
  params.in_features = kIn;
  params.first_row = c.first_row == 0 ? nullptr : &c.first_row;
  params.accumulate = c.accumulate;
  params.accumulate_mask = c.mask.empty() ? nullptr : c.mask.data();
  params.clear_tail = !is_weight;
  params.workspace = workspace.data();
  params.workspace_bytes = workspace.bytes().size();
  return params;
}

// What the result holds afterwards: poison, and zeros where no product writes.
std::vector<uint8_t> cleared(const Case& c, size_t num_bytes) {
  std::vector<uint8_t> expected(num_bytes, kPoison);
  if (c.product != GroupedProduct::kWeightGrad) {
    const int64_t row = 2 * (c.product == GroupedProduct::kForward ? kOut : kIn);
    std::fill(expected.begin() + (c.first_row + sum_of(c.counts)) * row, expected.end(), 0);
    return expected;
  }
  const int64_t weight = 4 * kOut * kIn;
  for (size_t e = 0; e < c.counts.size(); ++e) {
    const bool adds = c.mask.empty() ? c.accumulate : c.mask[e] != 0;
    if (c.counts[e] == 0 && !adds) {
      std::fill_n(expected.begin() + static_cast<int64_t>(e) * weight, weight, 0);
    }
  }
  return expected;
}

void check(const Case& c) {
  const auto num_experts = static_cast<int64_t>(c.counts.size());
  const bool is_weight = c.product == GroupedProduct::kWeightGrad;
  const int64_t rows = c.first_row + sum_of(c.counts) + (c.without_counts ? 0 : kTail);
  const int64_t columns = c.product == GroupedProduct::kForward ? kOut : kIn;
  Memory result(is_weight ? num_experts * 4 * kOut * kIn : rows * 2 * columns);
  Memory found(moe::grouped_arguments_bytes(num_experts));
  Memory expected(moe::grouped_arguments_bytes(num_experts));
  const GroupedGemmParams params = params_of(c, result, found);
  grouped_gemm_set_up(params, nullptr);
  moe::fill_grouped_arguments(
      {.product = c.product,
       .num_rows = rows,
       .num_experts = num_experts,
       .out_features = kOut,
       .in_features = kIn,
       .operand_bytes = c.is_scaled ? 1 : 2,
       .result_bytes = is_weight ? 4 : 2},
      params.m_splits, params.first_row, params.accumulate_mask, c.accumulate,
      {reinterpret_cast<uint64_t>(params.a), reinterpret_cast<uint64_t>(params.b),
       reinterpret_cast<uint64_t>(params.d), reinterpret_cast<uint64_t>(params.a_scale),
       reinterpret_cast<uint64_t>(params.b_scale)},
      moe::grouped_arguments_at(expected.data(), num_experts));
  EXPECT_EQ(found.bytes(), expected.bytes());
  EXPECT_EQ(result.bytes(), cleared(c, result.bytes().size()));
}

TEST(GroupedSetUp, WritesWhatItsTwinDoesAndClearsTheRest) {
  for (const int64_t num_experts : {1, 7, 300}) {
    SCOPED_TRACE(num_experts);
    const std::vector<int64_t> counts = random_counts(num_experts, 1);
    check({.product = GroupedProduct::kForward, .counts = counts});
    check({.product = GroupedProduct::kInputGrad, .counts = counts, .first_row = 9});
    check({.product = GroupedProduct::kWeightGrad, .counts = counts});
    std::vector<uint8_t> mask(counts.size());
    for (size_t e = 0; e < mask.size(); ++e) {
      mask[e] = e % 3 == 0;
    }
    check({.product = GroupedProduct::kWeightGrad,
           .counts = counts,
           .accumulate = true,
           .mask = mask});
  }
  check({.product = GroupedProduct::kForward, .counts = std::vector<int64_t>(1024, 1)});
  check({.product = GroupedProduct::kForward, .counts = std::vector<int64_t>(4, 0)});
}

TEST(GroupedSetUp, FindsTheScalesOfFactorsOf8Bits) {
  std::vector<int64_t> counts = random_counts(300, 2);
  counts[3] = 300;
  for (const auto product : {GroupedProduct::kForward, GroupedProduct::kWeightGrad}) {
    check({.product = product, .counts = counts, .is_scaled = true});
    check({.product = product, .counts = {200}, .is_scaled = true, .without_counts = true});
  }
}

TEST(GroupedSetUp, RefusesProductsThatFactorsOf8BitsDoNotHave) {
  const Case c = {.product = GroupedProduct::kForward, .counts = {3, 4}, .is_scaled = true};
  Memory result(12 * 2 * kOut), workspace(moe::grouped_arguments_bytes(2));
  const GroupedGemmParams right = params_of(c, result, workspace);
  grouped_gemm_set_up(right, nullptr);
  const int64_t first_row = 0;
  const auto refuses = [&](auto&& change) {
    GroupedGemmParams wrong = right;
    change(wrong);
    EXPECT_THROW(grouped_gemm_set_up(wrong, nullptr), std::invalid_argument);
  };
  refuses([](GroupedGemmParams& p) { p.product = GroupedProduct::kInputGrad; });
  refuses([](GroupedGemmParams& p) { p.result = GroupedType::kFloat32; });
  refuses([](GroupedGemmParams& p) { p.accumulate = true; });
  refuses([&](GroupedGemmParams& p) { p.first_row = &first_row; });
  refuses([](GroupedGemmParams& p) { p.b_scale = nullptr; });
  refuses([](GroupedGemmParams& p) { p.in_features = 40; });
  refuses([](GroupedGemmParams& p) { p.m_splits = nullptr; });
  GroupedGemmParams empty = right;
  empty.num_rows = 0;
  empty.a_scale = nullptr;
  grouped_gemm_set_up(empty, nullptr);  // memory without elements has no address
}

using Change = void (*)(GroupedGemmParams&);

template <typename T>
void misplace(T*& pointer, uintptr_t address) {
  pointer = reinterpret_cast<T*>(address);
}

TEST(GroupedSetUp, ExplainsMistakes) {
  const Case c = {.product = GroupedProduct::kForward, .counts = {3, 4}};
  Memory result(12 * 2 * kOut), workspace(moe::grouped_arguments_bytes(2));
  const GroupedGemmParams right = params_of(c, result, workspace);
  const std::pair<Change, const char*> mistakes[] = {
      {[](auto& p) { p.num_experts = 0; }, "num_experts is 0; one launch takes 1 to 1024"},
      {[](auto& p) { p.num_experts = 1025; }, "num_experts is 1025"},
      {[](auto& p) { p.num_rows = int64_t{1} << 31; }, "below 2^31, got 2147483648"},
      {[](auto& p) { p.out_features = 60; }, "a multiple of 8, so that rows are aligned to 16"},
      {[](auto& p) { p.out_features = 60; }, "the nearest is 64"},
      {[](auto& p) { p.in_features = 3; }, "the nearest is 8"},
      {[](auto& p) { misplace(p.a, 1048584); }, "the first factor lies at address 1048584"},
      {[](auto& p) { p.b = nullptr; }, "the second factor lies at address 0"},
      {[](auto& p) { misplace(p.d, 1048578); }, "the result lies at address 1048578"},
      {[](auto& p) { misplace(p.m_splits, 4); }, "m_splits lies at address 4"},
      {[](auto& p) { misplace(p.workspace, 128); }, "a multiple of 256"},
      {[](auto& p) { p.operand = GroupedType::kFloat32; }, "the factors are float32"},
      {[](auto& p) { p.result = GroupedType::kFloat16; }, "must have the type of the factors"},
      {[](auto& p) { p.result = GroupedType::kFloat32; }, "only a weight gradient may be float32"},
      {[](auto& p) { p.accumulate = true; }, "only a weight gradient in float32 can be added"},
  };
  for (const auto launcher : {grouped_gemm, grouped_gemm_set_up}) {
    for (const auto& [change, message] : mistakes) {
      GroupedGemmParams wrong = right;
      change(wrong);
      try {
        launcher(wrong, nullptr);
        ADD_FAILURE() << message;
      } catch (const std::invalid_argument& error) {
        EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
      }
    }
  }
  GroupedGemmParams nothing = right;
  nothing.num_rows = 0;
  nothing.a = nothing.b = nullptr;
  nothing.d = nullptr;
  grouped_gemm(nothing, nullptr);  // needs no kernel
}

moe::GroupedProblem problem_of(GroupedProduct product, int64_t rows_per_expert) {
  return {.product = product,
          .num_rows = 32 * rows_per_expert,
          .num_experts = 32,
          .out_features = 2048,
          .in_features = 1024,
          .operand_bytes = 2,
          .result_bytes = 2};
}

TEST(GroupedPlan, TakesNarrowTilesForGroupsOfFewRows) {
  using enum GroupedTile;
  const auto tile = [](GroupedProduct product, int64_t rows, int major) {
    return choose_grouped_plan(problem_of(product, rows), 0, major).tile;
  };
  EXPECT_EQ(tile(GroupedProduct::kForward, 4096, 9), kWide);
  EXPECT_EQ(tile(GroupedProduct::kInputGrad, 64, 9), kNarrow);
  EXPECT_EQ(tile(GroupedProduct::kForward, 65, 9), kMiddle);
  EXPECT_EQ(tile(GroupedProduct::kForward, 640, 9), kMiddle);
  EXPECT_EQ(tile(GroupedProduct::kInputGrad, 641, 9), kWide);
  // Few rows to sum, and as much to write as ever.
  EXPECT_EQ(tile(GroupedProduct::kWeightGrad, 64, 9), kSquare);
  EXPECT_EQ(tile(GroupedProduct::kWeightGrad, 4096, 9), kWide);
  EXPECT_EQ(tile(GroupedProduct::kForward, 64, 10), kWide);  // the only one there
}

TEST(GroupedPlan, TakesSquareTilesForResultsOfFewColumns) {
  moe::GroupedProblem problem = problem_of(GroupedProduct::kForward, 256);
  problem.out_features = 128;
  EXPECT_EQ(choose_grouped_plan(problem, 0, 9).tile, GroupedTile::kSquare);
  EXPECT_FALSE(choose_grouped_plan(problem, 0, 9).along_columns);
  problem.out_features = 136;
  EXPECT_EQ(choose_grouped_plan(problem, 0, 9).tile, GroupedTile::kMiddle);
}

TEST(GroupedPlan, FollowsTheExpectedRowsAndNotTheCapacity) {
  const moe::GroupedProblem problem = problem_of(GroupedProduct::kForward, 1024);
  EXPECT_EQ(choose_grouped_plan(problem, 0, 9).tile, GroupedTile::kWide);
  EXPECT_EQ(choose_grouped_plan(problem, 1024, 9).tile, GroupedTile::kWide);
  EXPECT_EQ(choose_grouped_plan(problem, 640, 9).tile, GroupedTile::kMiddle);
  EXPECT_EQ(choose_grouped_plan(problem, 64, 9).tile, GroupedTile::kNarrow);
}

}  // namespace
}  // namespace megacore::cuda
