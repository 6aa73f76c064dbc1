#include "megacore/layers/dropout.h"

#include "arguments.h"
#include "cpu.h"

namespace megacore::ops {

Tensor counter_dropout(Tensor x,
                       Tensor sample_ids,
                       Tensor positions,
                       std::optional<Tensor> key,
                       int64_t value,
                       double p) {
  const layers::DropoutRule rule = checked_dropout(x, sample_ids, positions, key, p);
  x = contiguous(std::move(x));
  sample_ids = contiguous(std::move(sample_ids));
  positions = contiguous(std::move(positions));
  Tensor y = empty_like(x);
  for_dtype(x.dtype(), [&]<typename Float>(Float) {
    layers::dropout(x.data<Float>(), sample_ids.data<int64_t>(), positions.data<int64_t>(),
                    key ? *key->data<int64_t>() : value, rule, y.mutable_data<Float>(),
                    num_threads());
  });
  return y;
}

}  // namespace megacore::ops
