#include "cpu.h"
#include "megacore/moe/grouped_gemm.h"

namespace megacore::ops {
namespace {

enum Product : int64_t { kForward, kInputGrad, kWeightGrad };  // as in gemm_cuda.py

moe::GroupedShape checked_shape(const Tensor& a,
                                const Tensor& b,
                                const Tensor& m_splits,
                                int64_t product,
                                const std::optional<Tensor>& out,
                                bool accumulate) {
  MC_REQUIRE(product >= kForward && product <= kWeightGrad, "product must be 0, 1 or 2, got {}",
             product);
  MC_REQUIRE(out || product != kWeightGrad, "a weight gradient must have an out to write to");
  const Tensor& w = product == kWeightGrad ? *out : b;
  MC_REQUIRE(a.dim() == 2 && w.dim() == 3 && (product != kWeightGrad || b.dim() == 2),
             "rows must have 2 axes and weights 3, got a {}, b {}", shape_text(a), shape_text(b));
  const moe::GroupedShape shape = {a.size(0), w.size(0), w.size(1), w.size(2)};
  const int64_t n = shape.out_features, k = shape.in_features;
  MC_REQUIRE(a.size(1) == (product == kForward ? k : n) &&
                 (product != kWeightGrad || (b.size(0) == shape.num_rows && b.size(1) == k)),
             "a {} and b {} do not fit weights {}", shape_text(a), shape_text(b), shape_text(w));
  MC_REQUIRE(m_splits.dtype() == kDTypes.int64 && m_splits.dim() == 1 &&
                 m_splits.size(0) == shape.num_experts,
             "m_splits must be ({},) int64, got {}", shape.num_experts, shape_text(m_splits));
  if (out) {
    MC_REQUIRE((out->dtype() == kDTypes.float32 || (out->dtype() == a.dtype() && !accumulate)) &&
                   out->is_contiguous(),
               "out must be float32 or, unless it is added to, of the dtype of a, and contiguous; "
               "got {}",
               shape_text(*out));
    MC_REQUIRE(product == kWeightGrad || (out->dim() == 2 && out->size(0) == shape.num_rows &&
                                          out->size(1) == (product == kForward ? n : k)),
               "out must be ({}, {}), got {}", shape.num_rows, product == kForward ? n : k,
               shape_text(*out));
  }
  return shape;
}

// The dtype in which a tensor is multiplied: its own, or float32.
int32_t product_dtype(int32_t dtype) {
  return format_of(dtype) == moe::NumberFormat::kFloat32 ? kDTypes.float32 : dtype;
}

int64_t bytes_from(int64_t elements, int32_t dtype) {
  return elements * (format_of(dtype) == moe::NumberFormat::kFloat32 ? 4 : 2);
}
moe::Source elements_from(const Tensor& tensor, int64_t first) {
  return {tensor.data<char>() + bytes_from(first, tensor.dtype()), format_of(tensor.dtype())};
}
moe::Target elements_to(const Tensor& tensor, int64_t first) {
  return {tensor.mutable_data<char>() + bytes_from(first, tensor.dtype()),
          format_of(tensor.dtype())};
}

int64_t checked_first_row(const std::optional<Tensor>& first_row, int64_t num_rows) {
  if (!first_row) {
    return 0;
  }
  MC_REQUIRE(first_row->dtype() == kDTypes.int64 && first_row->numel() == 1,
             "first_row must be an int64 scalar, got {}", shape_text(*first_row));
  const int64_t first = *first_row->data<int64_t>();
  MC_REQUIRE(first >= 0 && first <= num_rows, "first_row must be in [0, {}], got {}", num_rows,
             first);
  return first;
}

// Zeros the gradients of experts that do not add to them.
void clear_masked(const Tensor& mask, const moe::GroupedShape& shape, float* grad_w) {
  MC_REQUIRE(mask.dtype() == kDTypes.boolean && mask.dim() == 1 &&
                 mask.size(0) == shape.num_experts && mask.is_contiguous(),
             "mask must be ({},) bool, contiguous, got {}", shape.num_experts, shape_text(mask));
  const int64_t numel = shape.out_features * shape.in_features;
  for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
    if (!mask.data<bool>()[expert]) {
      std::fill_n(grad_w + expert * numel, numel, 0.0F);
    }
  }
}

}  // namespace

Tensor grouped_product(Tensor a,
                       Tensor b,
                       Tensor m_splits,
                       int64_t product,
                       std::optional<Tensor> out,
                       std::optional<Tensor> first_row,
                       std::optional<Tensor> mask,
                       bool accumulate,
                       bool clear_padding,
                       int64_t expected_rows) {
  static_cast<void>(expected_rows);  // a hint for GPUs
  moe::GroupedShape shape = checked_shape(a, b, m_splits, product, out, accumulate);
  const int64_t first = checked_first_row(first_row, shape.num_rows);
  const int64_t n = shape.out_features, k = shape.in_features;
  const int32_t dtype = a.dtype(), dtype_of_b = b.dtype();
  a = contiguous(std::move(a), product_dtype(dtype));
  b = contiguous(std::move(b), product_dtype(dtype_of_b));
  m_splits = contiguous(std::move(m_splits));
  const int64_t width = product == kForward ? n : k;
  const Tensor* partly = clear_padding ? nullptr : &a;
  Tensor result =
      out ? std::move(*out) : empty({shape.num_rows, width}, product_dtype(dtype), partly);
  // Rows before the first and behind the last one belong to other groups.
  shape.num_rows -= first;
  clear_padding = clear_padding && !first_row;
  const moe::Source left = elements_from(a, first * (product == kForward ? k : n));
  const auto* splits = m_splits.data<int64_t>();
  if (product == kForward) {
    moe::grouped_gemm(left, elements_from(b, 0), splits, elements_to(result, first * n), shape,
                      clear_padding, num_threads());
  } else if (product == kInputGrad) {
    moe::grouped_gemm_input_grad(left, elements_from(b, 0), splits, elements_to(result, first * k),
                                 shape, clear_padding, num_threads());
  } else {
    if (accumulate && mask) {
      clear_masked(*mask, shape, result.mutable_data<float>());
    }
    moe::grouped_gemm_weight_grad(left, elements_from(b, first * k), splits, elements_to(result, 0),
                                  shape, accumulate, num_threads());
  }
  // An operation of torch may not return its argument.
  return out ? empty({0}, dtype) : contiguous(std::move(result), dtype);
}

}  // namespace megacore::ops
