#include "megacore/cuda/fp8.h"

#include "device.h"
#include "operations.h"

namespace megacore::ops {

std::tuple<Tensor, Tensor> quantize_rows(Tensor x, std::optional<Tensor> num_rows) {
  check_quantize_rows(x, num_rows);
  const Device device(x, num_rows);
  x = device.contiguous(std::move(x));
  const int64_t rows = x.size(0), width = x.size(1);
  const Tensor* partly = num_rows ? &x : nullptr;
  Tensor values = device.empty(x.sizes(), kDTypes.float8, partly);
  Tensor scales = device.empty({rows, moe::scale_blocks(width)}, kDTypes.float32, partly);
  cuda::quantize_rows({.type = float_type(x),
                       .x = x.data<void>(),
                       .values = values.mutable_data<uint8_t>(),
                       .scales = scales.mutable_data<float>(),
                       .num_rows = data_of<int64_t>(num_rows),
                       .rows = rows,
                       .width = width},
                      device.stream());
  return {std::move(values), std::move(scales)};
}

std::tuple<Tensor, Tensor> quantize_columns(Tensor x,
                                            std::optional<Tensor> m_splits,
                                            bool transposed) {
  const Device device(x, m_splits);
  m_splits = device.contiguous(std::move(m_splits));
  const moe::ExpertRows rows = checked_expert_rows(x, m_splits);
  x = device.contiguous(std::move(x));
  const QuantizedColumns shapes(rows, transposed);
  Tensor values = device.empty(shapes.values, kDTypes.float8, &x);
  Tensor scales = device.empty(shapes.scales, kDTypes.float32, &x);
  cuda::quantize_columns({.type = float_type(x),
                          .x = x.data<void>(),
                          .values = values.mutable_data<uint8_t>(),
                          .scales = scales.mutable_data<float>(),
                          .shape = rows,
                          .transposed = transposed},
                         device.stream());
  return {std::move(values), std::move(scales)};
}

void quantize_blocks(Tensor w, bool transposed, Tensor values, Tensor scales) {
  QuantizedBlocks(w, transposed).check(values, scales);
  const Device device(w, values, scales);
  w = device.contiguous(std::move(w));
  cuda::quantize_blocks({.type = float_type(w),
                         .x = w.data<void>(),
                         .values = values.mutable_data<uint8_t>(),
                         .scales = scales.mutable_data<float>(),
                         .num = w.size(0),
                         .height = w.size(1),
                         .width = w.size(2),
                         .transposed = transposed},
                        device.stream());
}

}  // namespace megacore::ops
