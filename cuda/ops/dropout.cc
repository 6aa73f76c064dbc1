#include "megacore/cuda/dropout.h"

#include "device.h"
#include "operations.h"

namespace megacore::ops {

Tensor counter_dropout(Tensor x,
                       Tensor sample_ids,
                       Tensor positions,
                       std::optional<Tensor> key,
                       int64_t value,
                       double p) {
  const layers::DropoutRule rule = checked_dropout(x, sample_ids, positions, key, p);
  const Device device(x, sample_ids, positions, key);
  x = device.contiguous(std::move(x));
  sample_ids = device.contiguous(std::move(sample_ids));
  positions = device.contiguous(std::move(positions));
  Tensor y = device.empty_like(x);
  cuda::dropout({.type = float_type(x),
                 .x = x.data<void>(),
                 .sample_ids = sample_ids.data<int64_t>(),
                 .positions = positions.data<int64_t>(),
                 .key = data_of<int64_t>(key),
                 .key_value = value,
                 .y = y.mutable_data<void>(),
                 .rule = rule},
                device.stream());
  return y;
}

}  // namespace megacore::ops
