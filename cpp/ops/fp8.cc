#include "megacore/moe/fp8.h"

#include "arguments.h"
#include "cpu.h"

namespace megacore::ops {

std::tuple<Tensor, Tensor> quantize_rows(Tensor x, std::optional<Tensor> num_rows) {
  check_quantize_rows(x, num_rows);
  x = contiguous(std::move(x));
  const int64_t rows = x.size(0), width = x.size(1);
  const Tensor* partly = num_rows ? &x : nullptr;
  Tensor values = empty(x.sizes(), kDTypes.float8, partly);
  Tensor scales = empty({rows, moe::scale_blocks(width)}, kDTypes.float32, partly);
  for_dtype(x.dtype(), [&]<typename Float>(Float) {
    moe::quantize_rows(x.data<Float>(), values.mutable_data<uint8_t>(),
                       scales.mutable_data<float>(), data_of<int64_t>(num_rows), rows, width,
                       num_threads());
  });
  return {std::move(values), std::move(scales)};
}

std::tuple<Tensor, Tensor> quantize_columns(Tensor x,
                                            std::optional<Tensor> m_splits,
                                            bool transposed) {
  m_splits = contiguous(std::move(m_splits));
  const moe::ExpertRows rows = checked_expert_rows(x, m_splits);
  x = contiguous(std::move(x));
  const QuantizedColumns shapes(rows, transposed);
  Tensor values = empty(shapes.values, kDTypes.float8, &x);
  Tensor scales = empty(shapes.scales, kDTypes.float32, &x);
  for_dtype(x.dtype(), [&]<typename Float>(Float) {
    moe::quantize_columns(x.data<Float>(), values.mutable_data<uint8_t>(),
                          scales.mutable_data<float>(), rows, transposed, num_threads());
  });
  return {std::move(values), std::move(scales)};
}

void quantize_blocks(Tensor w, bool transposed, Tensor values, Tensor scales) {
  QuantizedBlocks(w, transposed).check(values, scales);
  w = contiguous(std::move(w));
  for_dtype(w.dtype(), [&]<typename Float>(Float) {
    moe::quantize_blocks(w.data<Float>(), values.mutable_data<uint8_t>(),
                         scales.mutable_data<float>(), w.size(0), w.size(1), w.size(2), transposed,
                         num_threads());
  });
}

}  // namespace megacore::ops
