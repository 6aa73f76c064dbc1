// Loops of one token, compiled once per vector width.

#pragma once

#include <cstdint>

namespace megacore::decode {

// One query head and the keys and values of `count` tokens.
struct Head {
  const float* query;
  const float* keys;    // of token t at keys + t * stride
  const float* values;  // likewise
  int64_t stride;
  int64_t count;
  int64_t dim;
  float scale;
  float softcap;      // 0: none
  const float* sink;  // a score without a value, or null
};

// out (dim) = softmax of the scores, times the values. `scores` has room for `count` numbers.
void attend(const Head& head, float* scores, float* out);

// y[i][n] = x[i] . w[n] (+ bias[n]); x has rows of `depth`, y of `features`.
void linear(const float* x,
            const float* weight,
            const float* bias,
            float* y,
            int64_t rows,
            int64_t features,
            int64_t depth,
            int num_threads);

}  // namespace megacore::decode
