#include "arguments.h"
#include "cpu.h"
#include "megacore/moe/permutation.h"

namespace megacore::ops {
namespace {

moe::RowMap map_of(const Tensor& row_map, int64_t num_rows) {
  return {row_map.data<int64_t>(), row_map.size(0), row_map.size(1), num_rows};
}

// The same map with each copy as a token with one choice, for numbers per copy.
moe::RowMap map_of_copies(const Tensor& row_map, int64_t num_rows) {
  return {row_map.data<int64_t>(), row_map.size(0) * row_map.size(1), 1, num_rows};
}

// REQUIRES: contiguous arguments.
Tensor permuted(const Tensor& tokens,
                const Tensor& row_map,
                int64_t num_rows,
                const std::optional<Tensor>& weights) {
  Tensor rows = empty({num_rows, tokens.size(1)}, tokens.dtype());
  for_dtype(tokens.dtype(), [&]<typename Float>(Float) {
    moe::permute(tokens.data<Float>(), data_of<float>(weights), rows.mutable_data<Float>(),
                 map_of(row_map, num_rows), tokens.size(1), num_threads());
  });
  return rows;
}

Tensor unpermuted(const Tensor& rows, const Tensor& row_map, const std::optional<Tensor>& weights) {
  Tensor tokens = empty({row_map.size(0), rows.size(1)}, rows.dtype());
  for_dtype(rows.dtype(), [&]<typename Float>(Float) {
    moe::unpermute(rows.data<Float>(), data_of<float>(weights), tokens.mutable_data<Float>(),
                   map_of(row_map, rows.size(0)), rows.size(1), num_threads());
  });
  return tokens;
}

}  // namespace

std::tuple<Tensor, Tensor> sort_by_expert(Tensor expert_of, int64_t num_experts) {
  check_sort(expert_of, num_experts);
  expert_of = contiguous(std::move(expert_of));
  Tensor row_map = empty_like(expert_of), counts = empty({num_experts}, kDTypes.int64);
  moe::sort_by_expert(expert_of.data<int64_t>(), expert_of.numel(), num_experts,
                      row_map.mutable_data<int64_t>(), counts.mutable_data<int64_t>());
  return {std::move(row_map), std::move(counts)};
}

Tensor top_k(Tensor scores, int64_t k) {
  check_top_k(scores, k);
  scores = contiguous(std::move(scores), kDTypes.float32);  // widening preserves their order
  Tensor chosen = empty({scores.size(0), k}, kDTypes.int64);
  moe::top_k(scores.data<float>(), scores.size(0), scores.size(1), k,
             chosen.mutable_data<int64_t>(), num_threads());
  return chosen;
}

Tensor permute(Tensor tokens, Tensor row_map, int64_t num_rows, std::optional<Tensor> weights) {
  check_permute(tokens, row_map, num_rows, weights);
  weights = contiguous(std::move(weights), kDTypes.float32);
  return permuted(contiguous(std::move(tokens)), contiguous(std::move(row_map)), num_rows, weights);
}

Tensor unpermute(Tensor rows, Tensor row_map, std::optional<Tensor> weights) {
  check_unpermute(rows, row_map, weights);
  weights = contiguous(std::move(weights), kDTypes.float32);
  return unpermuted(contiguous(std::move(rows)), contiguous(std::move(row_map)), weights);
}

std::tuple<Tensor, Tensor> permute_both(Tensor tokens,
                                        Tensor probs,
                                        Tensor row_map,
                                        int64_t num_rows) {
  check_permute(tokens, row_map, num_rows, std::nullopt);
  check_copy_probs(probs, row_map);
  probs = contiguous(std::move(probs));
  row_map = contiguous(std::move(row_map));
  Tensor rows = permuted(contiguous(std::move(tokens)), row_map, num_rows, std::nullopt);
  Tensor row_probs = empty({num_rows}, kDTypes.float32);
  moe::permute<float>(probs.data<float>(), nullptr, row_probs.mutable_data<float>(),
                      map_of_copies(row_map, num_rows), 1, num_threads());
  return {std::move(rows), std::move(row_probs)};
}

std::tuple<Tensor, Tensor> unpermute_both(Tensor rows, Tensor row_probs, Tensor row_map) {
  check_map(row_map);
  check_row_probs(rows, row_probs);
  row_probs = contiguous(std::move(row_probs));
  row_map = contiguous(std::move(row_map));
  Tensor tokens = unpermuted(contiguous(std::move(rows)), row_map, std::nullopt);
  Tensor probs = empty(row_map.sizes(), kDTypes.float32);
  moe::unpermute<float>(row_probs.data<float>(), nullptr, probs.mutable_data<float>(),
                        map_of_copies(row_map, row_probs.size(0)), 1, num_threads());
  return {std::move(tokens), std::move(probs)};
}

Tensor row_dots(Tensor tokens, Tensor rows, Tensor row_map) {
  check_row_dots(tokens, rows, row_map);
  tokens = contiguous(std::move(tokens));
  rows = contiguous(std::move(rows));
  row_map = contiguous(std::move(row_map));
  Tensor dots = empty(row_map.sizes(), kDTypes.float32);
  for_dtype(rows.dtype(), [&]<typename Float>(Float) {
    moe::row_dots(tokens.data<Float>(), rows.data<Float>(), dots.mutable_data<float>(),
                  map_of(row_map, rows.size(0)), rows.size(1), num_threads());
  });
  return dots;
}

}  // namespace megacore::ops
