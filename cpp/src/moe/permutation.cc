#include "megacore/moe/permutation.h"

#include <algorithm>
#include <vector>

#include "megacore/base/check.h"
#include "megacore/base/lane_sum.h"
#include "megacore/base/low_precision.h"
#include "megacore/base/parallel_for.h"
#include "megacore/base/vector_clones.h"

namespace megacore::moe {
namespace {

// Elements copied that are worth a thread.
constexpr int64_t kGrainNumel = 1 << 16;

using base::narrow;
using base::widen;

template <typename Float>
MC_VECTOR_CLONES void scale_row(const Float* __restrict__ from,
                                float factor,
                                Float* __restrict__ to,
                                int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    narrow(factor * widen(from[i]), to[i]);
  }
}

template <typename Float>
MC_VECTOR_CLONES void add_row(const Float* __restrict__ from,
                              float factor,
                              float* __restrict__ sum,
                              int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    sum[i] += factor * widen(from[i]);
  }
}

template <typename Float>
MC_VECTOR_CLONES void round_row(const float* __restrict__ from,
                                Float* __restrict__ to,
                                int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    narrow(from[i], to[i]);
  }
}

template <typename Float>
MC_VECTOR_CLONES float dot(const Float* __restrict__ a,
                           const Float* __restrict__ b,
                           int64_t width) {
  return base::sum(
      width, [=](int64_t i) __attribute__((always_inline)) { return widen(a[i]) * widen(b[i]); });
}

void check_map(const RowMap& map, int64_t width, int num_threads) {
  MC_REQUIRE(map.num_tokens >= 0 && map.num_choices >= 0 && map.num_rows >= 0 && width >= 0,
             "a size is negative");
  MC_REQUIRE(num_threads >= 1, "num_threads must be at least 1, got {}", num_threads);
  for (int64_t i = 0; i < map.num_tokens * map.num_choices; ++i) {
    MC_REQUIRE(map.rows[i] >= -1 && map.rows[i] < map.num_rows,
               "row {} of copy {} of token {} is not among the {} rows; use -1 for a copy that "
               "does not exist",
               map.rows[i], i % map.num_choices, i / map.num_choices, map.num_rows);
  }
}

int64_t grain(const RowMap& map, int64_t width) {
  return std::max(int64_t{1}, kGrainNumel / std::max(int64_t{1}, width * map.num_choices));
}

// Orders floats as integers, with NaN on top.
uint32_t rank_of(float value) {
  const uint32_t bits = base::bits_of_float(value == 0.0F ? 0.0F : value);
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  const uint32_t rank = (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
  return is_nan ? 0xffffffffU : rank;
}

void top_k_row(const float* scores, int64_t columns, int64_t k, int64_t* chosen, uint32_t* best) {
  // An insertion sort of the k best so far: k is small, and most columns fail the first test.
  int64_t found = 0;
  for (int64_t column = 0; column < columns; ++column) {
    const uint32_t rank = rank_of(scores[column]);
    if (found == k && rank <= best[k - 1]) {
      continue;
    }
    int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && best[at - 1] < rank; --at) {
      best[at] = best[at - 1];
      chosen[at] = chosen[at - 1];
    }
    best[at] = rank;
    chosen[at] = column;
  }
}

}  // namespace

void sort_by_expert(const int64_t* expert_of,
                    int64_t numel,
                    int64_t num_experts,
                    int64_t* row_map,
                    int64_t* tokens_per_expert) {
  MC_REQUIRE(numel >= 0 && num_experts >= 0, "a size is negative");
  std::fill_n(tokens_per_expert, num_experts, int64_t{0});
  for (int64_t i = 0; i < numel; ++i) {
    MC_REQUIRE(expert_of[i] >= -1 && expert_of[i] < num_experts,
               "copy {} is for expert {}; there are {} (use -1 for a copy that does not exist)", i,
               expert_of[i], num_experts);
    if (expert_of[i] >= 0) {
      ++tokens_per_expert[expert_of[i]];
    }
  }
  std::vector<int64_t> next(static_cast<size_t>(num_experts));
  int64_t row = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    next[static_cast<size_t>(e)] = row;
    row += tokens_per_expert[e];
  }
  for (int64_t i = 0; i < numel; ++i) {
    row_map[i] = expert_of[i] < 0 ? -1 : next[static_cast<size_t>(expert_of[i])]++;
  }
}

void top_k(const float* scores,
           int64_t rows,
           int64_t columns,
           int64_t k,
           int64_t* chosen,
           int num_threads) {
  MC_REQUIRE(k >= 1 && k <= columns, "k is {}; with {} columns it must lie in [1, {}]", k, columns,
             columns);
  MC_REQUIRE(num_threads >= 1, "num_threads must be at least 1, got {}", num_threads);
  const auto run = [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> best(static_cast<size_t>(k));
    for (int64_t row = begin; row < end; ++row) {
      top_k_row(scores + row * columns, columns, k, chosen + row * k, best.data());
    }
  };
  base::parallel_for(rows, std::max(int64_t{1}, kGrainNumel / columns), num_threads, run);
}

template <typename Float>
void permute(const Float* tokens,
             const float* weights,
             Float* rows,
             const RowMap& map,
             int64_t width,
             int num_threads) {
  check_map(map, width, num_threads);
  std::vector<bool> is_written(static_cast<size_t>(map.num_rows));
  for (int64_t i = 0; i < map.num_tokens * map.num_choices; ++i) {
    if (map.rows[i] >= 0) {
      is_written[static_cast<size_t>(map.rows[i])] = true;
    }
  }
  for (int64_t row = 0; row < map.num_rows; ++row) {
    if (!is_written[static_cast<size_t>(row)]) {
      std::fill_n(rows + row * width, width, Float{});
    }
  }
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * map.num_choices; i < end * map.num_choices; ++i) {
      if (map.rows[i] < 0) {
        continue;
      }
      const Float* from = tokens + i / map.num_choices * width;
      Float* to = rows + map.rows[i] * width;
      if (weights == nullptr) {
        std::copy_n(from, width, to);
      } else {
        scale_row(from, weights[i], to, width);
      }
    }
  };
  base::parallel_for(map.num_tokens, grain(map, width), num_threads, run);
}

template <typename Float>
void unpermute(const Float* rows,
               const float* weights,
               Float* tokens,
               const RowMap& map,
               int64_t width,
               int num_threads) {
  check_map(map, width, num_threads);
  const auto run = [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(width));
    for (int64_t token = begin; token < end; ++token) {
      std::fill(sum.begin(), sum.end(), 0.0F);
      for (int64_t j = 0; j < map.num_choices; ++j) {
        const int64_t i = token * map.num_choices + j;
        if (map.rows[i] >= 0) {
          const float factor = weights == nullptr ? 1.0F : weights[i];
          add_row(rows + map.rows[i] * width, factor, sum.data(), width);
        }
      }
      round_row(sum.data(), tokens + token * width, width);
    }
  };
  base::parallel_for(map.num_tokens, grain(map, width), num_threads, run);
}

template <typename Float>
void row_dots(const Float* tokens,
              const Float* rows,
              float* dots,
              const RowMap& map,
              int64_t width,
              int num_threads) {
  check_map(map, width, num_threads);
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * map.num_choices; i < end * map.num_choices; ++i) {
      const Float* token = tokens + i / map.num_choices * width;
      dots[i] = map.rows[i] < 0 ? 0.0F : dot(token, rows + map.rows[i] * width, width);
    }
  };
  base::parallel_for(map.num_tokens, grain(map, width), num_threads, run);
}

#define MC_INSTANTIATE(Float)                                                                      \
  template void permute<Float>(const Float*, const float*, Float*, const RowMap&, int64_t, int);   \
  template void unpermute<Float>(const Float*, const float*, Float*, const RowMap&, int64_t, int); \
  template void row_dots<Float>(const Float*, const Float*, float*, const RowMap&, int64_t, int);
MC_INSTANTIATE(float)
MC_INSTANTIATE(uint16_t)

}  // namespace megacore::moe
