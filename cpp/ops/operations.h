// Operations on CPU tensors; schemas, derivatives and references are in python/megacore/ops.

#pragma once

#include <tuple>

#include "tensor.h"

namespace megacore::ops {

// The normalized rows (..., H), and the factor of each, (..., 1) float32.
std::tuple<Tensor, Tensor> rms_norm(Tensor x, Tensor weight, double eps);

// The same of x + added, with the sum before them.
std::tuple<Tensor, Tensor, Tensor> add_rms_norm(Tensor x, Tensor added, Tensor weight, double eps);

// Gradients of x and weight, either without elements if it is not wanted.
std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad,
                                             Tensor x,
                                             Tensor weight,
                                             Tensor scale,
                                             bool of_x,
                                             bool of_weight,
                                             std::optional<Tensor> grad_sum);

// Activations of rows x (M, F), or (M, 2F) for swiglu, times a number per row; rows from
// `num_rows`, an int64 scalar, on are neither read nor written.
Tensor swiglu(Tensor x, std::optional<Tensor> probs, std::optional<Tensor> num_rows);
Tensor gelu(Tensor x, std::optional<Tensor> probs, std::optional<Tensor> num_rows);

// Gradients of x and, without elements if there are none, of the numbers per row.
std::tuple<Tensor, Tensor> swiglu_backward(Tensor grad,
                                           Tensor x,
                                           std::optional<Tensor> probs,
                                           std::optional<Tensor> num_rows);
std::tuple<Tensor, Tensor> gelu_backward(Tensor grad,
                                         Tensor x,
                                         std::optional<Tensor> probs,
                                         std::optional<Tensor> num_rows);

// Rows by expert of copies of tokens: row_map (T, k) holds the row of each copy, -1 for none.
std::tuple<Tensor, Tensor> sort_by_expert(Tensor expert_of, int64_t num_experts);
Tensor permute(Tensor tokens, Tensor row_map, int64_t num_rows, std::optional<Tensor> weights);
Tensor unpermute(Tensor rows, Tensor row_map, std::optional<Tensor> weights);
std::tuple<Tensor, Tensor> permute_both(Tensor tokens,
                                        Tensor probs,
                                        Tensor row_map,
                                        int64_t num_rows);
std::tuple<Tensor, Tensor> unpermute_both(Tensor rows, Tensor row_probs, Tensor row_map);
Tensor row_dots(Tensor tokens, Tensor rows, Tensor row_map);

// Sums in float32 of float operands. `product` is 0 for out[rows of e] = a[rows of e] b[e]^T, 1 for
// the same with b[e], and 2 for out[e] (+)= a[rows of e]^T b[rows of e], which needs `out`:
// float32, contiguous. With it the result has no elements, else it has the dtype of a. `mask`, one
// bool per expert, chooses which experts add to their part of `out` if `accumulate` is true.
Tensor grouped_product(Tensor a,
                       Tensor b,
                       Tensor m_splits,
                       int64_t product,
                       std::optional<Tensor> out,
                       std::optional<Tensor> first_row,
                       std::optional<Tensor> mask,
                       bool accumulate,
                       bool clear_padding,
                       int64_t expected_rows);

}  // namespace megacore::ops
