// A thread takes a pack of a token's features at a time and draws their numbers in registers.

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/dropout.h"
#include "row_io.cuh"

namespace megacore::cuda {
namespace {

template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads) dropout_kernel(DropoutParams params) {
  const layers::DropoutRule& rule = params.rule;
  const int64_t vectors = rule.width / kPack;
  const int64_t total = rule.sequence * rule.batch * vectors;
  const int64_t key = params.key == nullptr ? params.key_value : *params.key;
  Float rounded;
  narrow(rule.factor, rounded);
  const float factor = widen(rounded);
  for (int64_t i = int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < total;
       i += int64_t{gridDim.x} * kRowThreads) {
    const int64_t token = i / vectors;
    const int64_t first = (i - token * vectors) * kPack;
    const uint64_t start = layers::start_of_token(key, params.sample_ids[token % rule.batch],
                                                  params.positions[token / rule.batch]);
    Pack<Float, kPack> pack = load_pack<kPack>(static_cast<const Float*>(params.x), i);
#pragma unroll
    for (int n = 0; n < kPack; ++n) {
      const bool keeps = layers::keeps(start, first + n, rule.threshold);
      narrow(widen(pack.values[n]) * (keeps ? factor : 0.0F), pack.values[n]);
    }
    store_pack(static_cast<Float*>(params.y), i, pack);
  }
}

}  // namespace

void dropout(const DropoutParams& params, cudaStream_t stream) {
  const layers::DropoutRule& rule = params.rule;
  MC_REQUIRE(rule.sequence >= 0 && rule.batch >= 0 && rule.width >= 0,
             "sizes must be at least 0, got {} x {} x {}", rule.sequence, rule.batch, rule.width);
  const int64_t numel = rule.sequence * rule.batch * rule.width;
  if (numel == 0) {
    return;
  }
  const bool are_aligned = is_packed(params.x) && is_packed(params.y);
  with_float_type(params.type, are_aligned, rule.width, [&]<typename Float, int kPack>() {
    launch("dropout", dropout_kernel<Float, kPack>,
           {.blocks = divided_up(numel / kPack, kRowThreads), .threads = kRowThreads}, stream,
           params);
  });
}

}  // namespace megacore::cuda
