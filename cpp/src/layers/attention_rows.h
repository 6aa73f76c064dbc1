// Rows of scores of attention: one query with several keys, or one key with several queries.

#pragma once

#include <cstdint>
#include <limits>

namespace megacore::layers {

// Running softmax of one query.
struct RowState {
  float max = -std::numeric_limits<float>::infinity();  // of the scaled scores so far
  float sum = 0.0F;                                     // of exp(score - max)
};

// Turns the scores of `count` keys into weights relative to the maximum so far; returns the factor
// of what was summed before.
float softmax_row(float* scores, int64_t count, float scale, RowState& state);

void scale_row(float* row, int64_t count, float factor);

float dot_rows(const float* a, const float* b, int64_t count);

// Scores of a key become weights, and gradients of its weights those of its scores' products.
void grad_row(
    float* scores, float* grads, const float* lse, const float* delta, float scale, int64_t count);

}  // namespace megacore::layers
