// Operations on tensors of a module's device: CPUs in _ops (cpp/ops), GPUs in _cuda (cuda/ops).
// Schemas, derivatives and references are in python/megacore/ops.

#pragma once

#include <tuple>

#include "megacore/moe/activations.h"
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

// Splits qkv (S, B, G, (Q + 2) D) into heads and rotates q and k by tables (S, R) or (S, B, R); the
// gradients of the heads become that of qkv.
std::tuple<Tensor, Tensor, Tensor> split_and_rotate(Tensor qkv,
                                                    Tensor cos,
                                                    Tensor sin,
                                                    int64_t head_dim);
Tensor split_and_rotate_backward(
    Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor cos, Tensor sin);

// The same behind norms of q and k, whose factors (S, B, G, Q + 1) are the last result. Gradients
// of qkv and of both weights, without elements if they are not wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_and_rotate(Tensor qkv,
                                                           Tensor q_weight,
                                                           Tensor k_weight,
                                                           Tensor cos,
                                                           Tensor sin,
                                                           int64_t head_dim,
                                                           double eps);
std::tuple<Tensor, Tensor, Tensor> norm_and_rotate_backward(Tensor grad_q,
                                                            Tensor grad_k,
                                                            Tensor grad_v,
                                                            Tensor qkv,
                                                            Tensor q_weight,
                                                            Tensor k_weight,
                                                            Tensor scale,
                                                            Tensor cos,
                                                            Tensor sin,
                                                            bool of_qkv,
                                                            bool of_weights);

// Weights (T, k) and ids (T, k) of the chosen experts, statistics (2, P, E) and losses (2); the
// last two without elements unless `has_sums`. Adds the choices of each expert to `seen`.
std::tuple<Tensor, Tensor, Tensor, Tensor> route(Tensor logits,
                                                 std::optional<Tensor> bias,
                                                 std::optional<Tensor> chosen,
                                                 std::optional<Tensor> seen,
                                                 int64_t k,
                                                 int64_t num_pools,
                                                 bool is_sigmoid,
                                                 bool softmax_after_top_k,
                                                 bool normalize,
                                                 double scaling,
                                                 bool has_sums,
                                                 double aux_scale,
                                                 double z_scale);
Tensor route_backward(Tensor grad_probs,
                      Tensor logits,
                      Tensor ids,
                      std::optional<Tensor> counts,
                      std::optional<Tensor> aux_factor,
                      std::optional<Tensor> z_factor,
                      int64_t num_pools,
                      bool is_sigmoid,
                      bool softmax_after_top_k,
                      bool normalize,
                      double scaling,
                      double aux_scale,
                      double z_scale);

// Drops elements of x (S, B, H) by their counter; the key is a tensor or else `value`.
Tensor counter_dropout(Tensor x,
                       Tensor sample_ids,
                       Tensor positions,
                       std::optional<Tensor> key,
                       int64_t value,
                       double p);

// Activations of rows x (M, F), or (M, 2F) for swiglu, times a number per row; rows from
// `num_rows`, an int64 scalar, on are neither read nor written.
template <moe::Activation kKind>
Tensor activate(Tensor x, std::optional<Tensor> probs, std::optional<Tensor> num_rows);

// Gradients of x and, without elements if there are none, of the numbers per row.
template <moe::Activation kKind>
std::tuple<Tensor, Tensor> activate_backward(Tensor grad,
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

// The columns with the k largest scores of each row, the first of equal ones.
Tensor top_k(Tensor scores, int64_t k);

// One AdamW step in place, see buffer/adamw.h; `control` is the decision on it.
void adamw_step(Tensor param,
                Tensor grad,
                Tensor exp_avg,
                Tensor exp_avg_sq,
                std::optional<Tensor> copy_out,
                std::optional<Tensor> control,
                double lr,
                double beta1,
                double beta2,
                double eps,
                double weight_decay,
                double bias_correction1,
                double bias_correction2,
                double grad_scale);
void decide_step(Tensor state,
                 Tensor sums,
                 Tensor control,
                 double beta1,
                 double beta2,
                 double clip_grad,
                 double loss_scale_interval,
                 double num_averaged);

// The sum of all squares, a float64 scalar.
Tensor sum_of_squares(Tensor values);

// A plan of clones from the tokens of each rank for each expert (R, E), as `rank` needs it; see
// moe/offload_plan.h. Slots (R, S), tokens that it sends to them (R, S), tokens that it gets from
// each rank for its home experts and slots (R, E / R + S), loads before and after (R), the numbers
// of moe::PlanSummary, and the nanoseconds that it took. Tolerance and imbalance are in
// millionths.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> plan_offload(
    Tensor counts,
    int64_t rank,
    int64_t num_spare_slots,
    bool is_balanced,
    int64_t tolerance,
    int64_t min_imbalance,
    int64_t domain_size);

// The place of each copy (T, k), by a row of a plan with clones; see moe/reroute.h.
Tensor reroute(Tensor expert_ids, Tensor total, Tensor first, Tensor slot_expert, Tensor tokens);

// Adds a plan to sums, and returns the copies of each expert; or adds bytes for each slot whose
// expert is in [first, end). See moe/echo_counts.h.
Tensor count_plan(Tensor sums,
                  Tensor slot_expert,
                  Tensor load_before,
                  Tensor summary,
                  Tensor elapsed_ns,
                  Tensor copies_of_place,
                  int64_t num_experts);
void count_held(Tensor sums, Tensor slot_expert, int64_t first, int64_t end, int64_t num_bytes);

// Elements rounded to 8-bit floats and a float32 scale per block: of 128 columns of a row, of the
// rows of an expert and a column (`m_splits`, or one expert), and of 128 x 128 elements of a
// matrix, into given memory. See moe/fp8.h for the shapes; rows from `num_rows`, an int64 scalar,
// on are neither read nor written.
std::tuple<Tensor, Tensor> quantize_rows(Tensor x, std::optional<Tensor> num_rows);
std::tuple<Tensor, Tensor> quantize_columns(Tensor x,
                                            std::optional<Tensor> m_splits,
                                            bool transposed);
void quantize_blocks(Tensor w, bool transposed, Tensor values, Tensor scales);

// A tensor on the memory of another one, of any device, that does not own it.
Tensor weak_tensor(Tensor tensor);

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

// softmax(scale q k^T) v for each head, and the logarithm of each query's sum of exponentials: q
// (B, N, S, D), k (B, G, T, D) and v (B, G, T, E), of any strides, give (B, N, S, E) in the memory
// order of q and (B, N, S) float32; see layers/attention.h. The gradients have the order of q, k
// and v.
std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, bool is_causal, double scale);
std::tuple<Tensor, Tensor, Tensor> attention_backward(Tensor grad,
                                                      Tensor q,
                                                      Tensor k,
                                                      Tensor v,
                                                      Tensor mixed,
                                                      Tensor lse,
                                                      bool is_causal,
                                                      double scale);

}  // namespace megacore::ops
