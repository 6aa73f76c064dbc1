// The set-up kernel of grouped products, run on the CPU thread by thread: it writes what plain
// arithmetic gives, and clears exactly what no product writes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
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
  std::vector<int64_t> counts;  // negative or too large ones are truncated
  int64_t first_row = 0;
  bool accumulate = false;
  std::vector<uint8_t> mask = {};
  bool is_scaled = false;  // factors of 8 bits
  bool without_counts = false;
  int64_t num_rows = -1;  // default: what the counts need and some more
};

int64_t rows_of(const Case& c) {
  if (c.num_rows >= 0) {
    return c.num_rows;
  }
  return c.first_row + sum_of(c.counts) + (c.without_counts ? 0 : kTail);
}

struct Group {
  int64_t expert, start, count;
};

// The rows of each expert, one after the other and at most all.
std::vector<Group> groups_of(const Case& c) {
  const int64_t num_rows = rows_of(c);
  int64_t used = std::clamp<int64_t>(c.first_row, 0, num_rows);
  std::vector<Group> groups;
  for (size_t e = 0; e < c.counts.size(); ++e) {
    const int64_t asked = c.without_counts ? num_rows : c.counts[e];
    const int64_t count = std::clamp<int64_t>(asked, 0, num_rows - used);
    groups.push_back({static_cast<int64_t>(e), used, count});
    used += count;
  }
  return groups;
}

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
  params.num_rows = rows_of(c);
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

// Entries of one group, in elements from the start of each matrix.
struct Expected {
  int64_t shape[3];
  int64_t a, b, d;
  int64_t a_stride, b_stride, d_stride;
  int64_t a_scale = 0, b_scale = 0;
};

Expected expected_group(const Case& c, const Group& group) {
  const int64_t weight = group.expert * kOut * kIn;
  const int64_t start = group.start, count = group.count;
  const int64_t out_blocks = 1, in_blocks = 1;  // of 128 elements
  const int64_t weight_blocks = group.expert * out_blocks * in_blocks;
  if (c.product == GroupedProduct::kForward) {
    return {.shape = {count, kOut, kIn},
            .a = start * kIn,
            .b = weight,
            .d = start * kOut,
            .a_stride = kIn,
            .b_stride = kIn,
            .d_stride = kOut,
            .a_scale = start * in_blocks,
            .b_scale = weight_blocks};
  }
  if (c.product == GroupedProduct::kInputGrad) {
    return {.shape = {count, kIn, kOut},
            .a = start * kOut,
            .b = weight,
            .d = start * kIn,
            .a_stride = kOut,
            .b_stride = kIn,
            .d_stride = kIn};
  }
  if (!c.is_scaled) {
    return {.shape = {count > 0 ? kOut : 0, kIn, count},
            .a = start * kOut,
            .b = start * kIn,
            .d = weight,
            .a_stride = kOut,
            .b_stride = kIn,
            .d_stride = kIn};
  }
  // Rows are padded to blocks of 128, and those of an expert begin with a new one.
  const int64_t block = start / 128 + group.expert, depth = (count + 127) / 128 * 128;
  return {.shape = {count > 0 ? kOut : 0, kIn, depth},
          .a = block * 128 * kOut,
          .b = block * 128 * kIn,
          .d = weight,
          .a_stride = depth,
          .b_stride = depth,
          .d_stride = kIn,
          .a_scale = block * kOut,
          .b_scale = block * kIn};
}

// The memory of the arguments of all groups; what no entry covers is poison.
std::vector<uint8_t> expected_arguments(const Case& c, const GroupedGemmParams& params) {
  const bool is_weight = c.product == GroupedProduct::kWeightGrad;
  std::vector<Group> groups = groups_of(c);
  if (is_weight) {  // the longest first
    std::ranges::stable_sort(groups, std::greater{}, &Group::count);
  }
  Memory memory(moe::grouped_arguments_bytes(params.num_experts));
  const moe::GroupedArguments to = moe::grouped_arguments_at(memory.data(), params.num_experts);
  const auto address = [](const void* base, int64_t elements, int64_t bytes) {
    return reinterpret_cast<uint64_t>(base) + static_cast<uint64_t>(elements * bytes);
  };
  const int64_t operand_bytes = c.is_scaled ? 1 : 2;
  for (size_t i = 0; i < groups.size(); ++i) {
    const Expected expected = expected_group(c, groups[i]);
    for (size_t axis = 0; axis < 3; ++axis) {
      to.shapes[3 * i + axis] = static_cast<int32_t>(expected.shape[axis]);
    }
    to.a[i] = address(params.a, expected.a, operand_bytes);
    to.b[i] = address(params.b, expected.b, operand_bytes);
    to.d[i] = address(params.d, expected.d, is_weight ? 4 : 2);
    to.a_stride[i] = expected.a_stride;
    to.b_stride[i] = expected.b_stride;
    to.d_stride[i] = expected.d_stride;
    if (c.is_scaled) {
      to.a_scale[i] = address(params.a_scale, expected.a_scale, 4);
      to.b_scale[i] = address(params.b_scale, expected.b_scale, 4);
    }
    const auto expert = static_cast<size_t>(groups[i].expert);
    to.beta[i] = (c.mask.empty() ? c.accumulate : c.mask[expert] != 0) ? 1.0F : 0.0F;
  }
  return memory.bytes();
}

// What the result holds afterwards: poison, and zeros where no product writes.
std::vector<uint8_t> cleared(const Case& c, size_t num_bytes) {
  std::vector<uint8_t> expected(num_bytes, kPoison);
  const std::vector<Group> groups = groups_of(c);
  if (c.product != GroupedProduct::kWeightGrad) {
    const int64_t row = 2 * (c.product == GroupedProduct::kForward ? kOut : kIn);
    const int64_t used = groups.back().start + groups.back().count;
    std::fill(expected.begin() + used * row, expected.end(), 0);
    return expected;
  }
  const int64_t weight = 4 * kOut * kIn;
  for (const Group& group : groups) {
    const auto e = static_cast<size_t>(group.expert);
    const bool adds = c.mask.empty() ? c.accumulate : c.mask[e] != 0;
    if (group.count == 0 && !adds) {
      std::fill_n(expected.begin() + group.expert * weight, weight, 0);
    }
  }
  return expected;
}

void check(const Case& c) {
  const auto num_experts = static_cast<int64_t>(c.counts.size());
  const bool is_weight = c.product == GroupedProduct::kWeightGrad;
  const int64_t columns = c.product == GroupedProduct::kForward ? kOut : kIn;
  Memory result(is_weight ? num_experts * 4 * kOut * kIn : rows_of(c) * 2 * columns);
  Memory found(moe::grouped_arguments_bytes(num_experts));
  const GroupedGemmParams params = params_of(c, result, found);
  grouped_gemm_set_up(params, nullptr);
  EXPECT_EQ(found.bytes(), expected_arguments(c, params));
  EXPECT_EQ(result.bytes(), cleared(c, result.bytes().size()));
}

// Counts that do not fit the rows, where the first ones begin anywhere.
Case wrong_case(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int64_t limit) {
    return std::uniform_int_distribution<int64_t>(0, limit - 1)(random);
  };
  Case c = {.product = static_cast<GroupedProduct>(below(3)),
            .counts = random_counts(1 + below(40), seed),
            .accumulate = below(2) == 1};
  const int64_t wrong[] = {-1, -1'000'000'000'000, int64_t{1} << 62, 7};
  c.counts[static_cast<size_t>(below(static_cast<int64_t>(c.counts.size())))] = wrong[below(4)];
  const int64_t first_rows[] = {0, 3, 1000, -1, int64_t{1} << 62};
  c.first_row = first_rows[below(5)];
  c.num_rows = below(100);
  c.accumulate = c.accumulate && c.product == GroupedProduct::kWeightGrad;
  return c;
}

TEST(GroupedSetUp, WritesWhatPlainArithmeticGivesAndClearsTheRest) {
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

TEST(GroupedSetUp, TruncatesCountsThatDoNotFitTheRows) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    check(wrong_case(seed));
  }
}

TEST(GroupedSetUp, ProcessesLongWeightGradientsFirst) {
  const Case c = {.product = GroupedProduct::kWeightGrad,
                  .counts = {3, 0, 9, 3},
                  .accumulate = true,
                  .mask = {1, 0, 0, 1}};
  check(c);
  Memory result(4 * 4 * kOut * kIn), found(moe::grouped_arguments_bytes(4));
  grouped_gemm_set_up(params_of(c, result, found), nullptr);
  const moe::GroupedArguments at = moe::grouped_arguments_at(found.data(), 4);
  const std::vector<int32_t> shapes(at.shapes, at.shapes + 12);
  EXPECT_EQ(shapes, (std::vector<int32_t>{kOut, kIn, 9, kOut, kIn, 3, kOut, kIn, 3, 0, kIn, 0}));
  EXPECT_EQ(std::vector<float>(at.beta, at.beta + 4), (std::vector<float>{0, 1, 1, 0}));
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
