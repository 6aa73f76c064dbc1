#include "device.h"
#include "megacore/cuda/permutation.h"
#include "megacore/cuda/topk.h"
#include "operations.h"

namespace megacore::ops {
namespace {

cuda::RowMap map_of(const Tensor& row_map, int64_t num_rows, int64_t width) {
  return {row_map.data<int64_t>(), row_map.size(0), row_map.size(1), num_rows, width};
}

// The same map with each copy as a token with one choice, for numbers per copy.
cuda::RowMap map_of_copies(const Tensor& row_map, int64_t num_rows) {
  return {row_map.data<int64_t>(), row_map.size(0) * row_map.size(1), 1, num_rows, 1};
}

// REQUIRES: contiguous tensors; `tokens` and `rows` have one dtype.
void permute_into(const Device& device,
                  const Tensor& tokens,
                  const cuda::RowMap& map,
                  const std::optional<Tensor>& weights,
                  Tensor& rows) {
  Tensor is_written = device.empty({map.num_rows}, kDTypes.uint8);
  cuda::permute({.tokens = tokens.data<void>(),
                 .weights = data_of<float>(weights),
                 .rows = rows.mutable_data<void>(),
                 .is_written = is_written.mutable_data<uint8_t>(),
                 .map = map,
                 .type = float_type(tokens)},
                device.stream());
}

void unpermute_into(const Device& device,
                    const Tensor& rows,
                    const cuda::RowMap& map,
                    const std::optional<Tensor>& weights,
                    Tensor& tokens) {
  cuda::unpermute({.rows = rows.data<void>(),
                   .weights = data_of<float>(weights),
                   .tokens = tokens.mutable_data<void>(),
                   .map = map,
                   .type = float_type(rows)},
                  device.stream());
}

}  // namespace

std::tuple<Tensor, Tensor> sort_by_expert(Tensor expert_of, int64_t num_experts) {
  check_sort(expert_of, num_experts);
  const Device device(expert_of);
  expert_of = device.contiguous(std::move(expert_of));
  const int64_t numel = expert_of.numel();
  Tensor row_map = device.empty_like(expert_of),
         counts = device.empty({num_experts}, kDTypes.int64);
  Tensor workspace = device.empty({cuda::sort_workspace_numel(numel, num_experts)}, kDTypes.int32);
  cuda::sort_by_expert({.expert_of = expert_of.data<int64_t>(),
                        .numel = numel,
                        .num_experts = num_experts,
                        .row_map = row_map.mutable_data<int64_t>(),
                        .tokens_per_expert = counts.mutable_data<int64_t>(),
                        .workspace = workspace.mutable_data<int32_t>()},
                       device.stream());
  return {std::move(row_map), std::move(counts)};
}

Tensor top_k(Tensor scores, int64_t k) {
  check_top_k(scores, k);
  const Device device(scores);
  scores = device.contiguous(std::move(scores), kDTypes.float32);  // widening preserves their order
  Tensor chosen = device.empty({scores.size(0), k}, kDTypes.int64);
  cuda::top_k({.scores = scores.data<float>(),
               .rows = scores.size(0),
               .columns = scores.size(1),
               .k = k,
               .chosen = chosen.mutable_data<int64_t>()},
              device.stream());
  return chosen;
}

Tensor permute(Tensor tokens, Tensor row_map, int64_t num_rows, std::optional<Tensor> weights) {
  check_permute(tokens, row_map, num_rows, weights);
  const Device device(tokens, row_map, weights);
  tokens = device.contiguous(std::move(tokens));
  row_map = device.contiguous(std::move(row_map));
  weights = device.contiguous(std::move(weights), kDTypes.float32);
  Tensor rows = device.empty({num_rows, tokens.size(1)}, tokens.dtype());
  permute_into(device, tokens, map_of(row_map, num_rows, tokens.size(1)), weights, rows);
  return rows;
}

Tensor unpermute(Tensor rows, Tensor row_map, std::optional<Tensor> weights) {
  check_unpermute(rows, row_map, weights);
  const Device device(rows, row_map, weights);
  rows = device.contiguous(std::move(rows));
  row_map = device.contiguous(std::move(row_map));
  weights = device.contiguous(std::move(weights), kDTypes.float32);
  Tensor tokens = device.empty({row_map.size(0), rows.size(1)}, rows.dtype());
  unpermute_into(device, rows, map_of(row_map, rows.size(0), rows.size(1)), weights, tokens);
  return tokens;
}

std::tuple<Tensor, Tensor> permute_both(Tensor tokens,
                                        Tensor probs,
                                        Tensor row_map,
                                        int64_t num_rows) {
  check_permute(tokens, row_map, num_rows, std::nullopt);
  check_copy_probs(probs, row_map);
  const Device device(tokens, probs, row_map);
  tokens = device.contiguous(std::move(tokens));
  probs = device.contiguous(std::move(probs));
  row_map = device.contiguous(std::move(row_map));
  Tensor rows = device.empty({num_rows, tokens.size(1)}, tokens.dtype());
  Tensor row_probs = device.empty({num_rows}, kDTypes.float32);
  permute_into(device, tokens, map_of(row_map, num_rows, tokens.size(1)), std::nullopt, rows);
  permute_into(device, probs, map_of_copies(row_map, num_rows), std::nullopt, row_probs);
  return {std::move(rows), std::move(row_probs)};
}

std::tuple<Tensor, Tensor> unpermute_both(Tensor rows, Tensor row_probs, Tensor row_map) {
  check_map(row_map);
  check_row_probs(rows, row_probs);
  const Device device(rows, row_probs, row_map);
  rows = device.contiguous(std::move(rows));
  row_probs = device.contiguous(std::move(row_probs));
  row_map = device.contiguous(std::move(row_map));
  const int64_t num_rows = rows.size(0);
  Tensor tokens = device.empty({row_map.size(0), rows.size(1)}, rows.dtype());
  Tensor probs = device.empty(row_map.sizes(), kDTypes.float32);
  unpermute_into(device, rows, map_of(row_map, num_rows, rows.size(1)), std::nullopt, tokens);
  unpermute_into(device, row_probs, map_of_copies(row_map, num_rows), std::nullopt, probs);
  return {std::move(tokens), std::move(probs)};
}

Tensor row_dots(Tensor tokens, Tensor rows, Tensor row_map) {
  check_row_dots(tokens, rows, row_map);
  const Device device(tokens, rows, row_map);
  tokens = device.contiguous(std::move(tokens));
  rows = device.contiguous(std::move(rows));
  row_map = device.contiguous(std::move(row_map));
  Tensor dots = device.empty(row_map.sizes(), kDTypes.float32);
  cuda::row_dots({.tokens = tokens.data<void>(),
                  .rows = rows.data<void>(),
                  .dots = dots.mutable_data<float>(),
                  .map = map_of(row_map, rows.size(0), rows.size(1)),
                  .type = float_type(rows)},
                 device.stream());
  return dots;
}

}  // namespace megacore::ops
