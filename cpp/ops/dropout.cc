#include "megacore/layers/dropout.h"

#include <cmath>

#include "operations.h"

namespace megacore::ops {

Tensor counter_dropout(Tensor x,
                       Tensor sample_ids,
                       Tensor positions,
                       std::optional<Tensor> key,
                       int64_t value,
                       double p) {
  MC_REQUIRE(x.dim() == 3, "x must be (S, B, H), got {}", shape_text(x));
  MC_REQUIRE(sample_ids.dtype() == kDTypes.int64 && sample_ids.numel() == x.size(1) &&
                 positions.dtype() == kDTypes.int64 && positions.numel() == x.size(0),
             "sample_ids must be ({},) and positions ({},), int64, got {} and {}", x.size(1),
             x.size(0), shape_text(sample_ids), shape_text(positions));
  MC_REQUIRE(!key || (key->dtype() == kDTypes.int64 && key->numel() == 1),
             "key must be an int64 scalar");
  MC_REQUIRE(p >= 0.0 && p < 1.0, "p must be in [0, 1), got {}", p);
  x = contiguous(std::move(x));
  sample_ids = contiguous(std::move(sample_ids));
  positions = contiguous(std::move(positions));
  // Of 64-bit numbers with a sign, the lower ones are dropped: p 2^64 of them.
  const auto dropped = static_cast<uint64_t>(std::nearbyint(p * 0x1p64));
  const auto threshold = static_cast<int64_t>(dropped ^ (uint64_t{1} << 63));
  Tensor y = empty_like(x);
  for_dtype(x.dtype(), [&]<typename Float>(Float) {
    layers::dropout(
        x.data<Float>(), sample_ids.data<int64_t>(), positions.data<int64_t>(),
        key ? *key->data<int64_t>() : value,
        {x.size(0), x.size(1), x.size(2), threshold, static_cast<float>(1.0 / (1.0 - p))},
        y.mutable_data<Float>(), num_threads());
  });
  return y;
}

}  // namespace megacore::ops
