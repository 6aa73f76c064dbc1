// Permutation of tokens into expert order and back.
//
// A row map (tokens, choices) has the row of each copy of each token; -1 is a missing copy.
//
//   expert_of {{1, 0}, {0, -1}}, 2 experts  ->  row_map {{2, 0}, {1, -1}}, tokens_per_expert {2, 1}
//
// Elements are fp32 or the bits of bfloat16; sums are fp32, in the order of the choices.

#pragma once

#include <cstdint>

namespace megacore::moe {

struct RowMap {
  const int64_t* rows;  // (num_tokens, num_choices), -1 or each of [0, num_rows) at most once
  int64_t num_tokens;
  int64_t num_choices;
  int64_t num_rows;
};

// Rows sorted by expert, then token, then choice. Writes row_map (numel) and tokens_per_expert.
// REQUIRES: every expert_of[i] in [-1, num_experts).
void sort_by_expert(const int64_t* expert_of,
                    int64_t numel,
                    int64_t num_experts,
                    int64_t* row_map,
                    int64_t* tokens_per_expert);

// The k largest scores of each row, best first; the lower column wins a tie, a NaN beats numbers.
// REQUIRES: 1 <= k <= columns.
void top_k(const float* scores,
           int64_t rows,
           int64_t columns,
           int64_t k,
           int64_t* chosen,
           int num_threads);

// rows[map[t][j]] = weights[t][j] * tokens[t], all other rows zero; a null `weights` is all ones.
// Float is float or uint16_t (bfloat16). REQUIRES: rows of the map in range, num_threads >= 1.
template <typename Float>
void permute(const Float* tokens,
             const float* weights,
             Float* rows,
             const RowMap& map,
             int64_t width,
             int num_threads);

// tokens[t] = sum over j of weights[t][j] * rows[map[t][j]]. REQUIRES: as above.
template <typename Float>
void unpermute(const Float* rows,
               const float* weights,
               Float* tokens,
               const RowMap& map,
               int64_t width,
               int num_threads);

// dots[t][j] = tokens[t] . rows[map[t][j]], 0 for missing copies. REQUIRES: as above.
template <typename Float>
void row_dots(const Float* tokens,
              const Float* rows,
              float* dots,
              const RowMap& map,
              int64_t width,
              int num_threads);

}  // namespace megacore::moe
