#include "megacore/cuda/grouped_gemm.h"

#include "device.h"
#include "gpu_operations.h"

namespace megacore::ops {
namespace {

// A number of Python as an enumerator of ours, if it is one.
template <typename Enum>
Enum enumerator(const char* name, int64_t value, Enum last) {
  MC_REQUIRE(value >= 0 && value <= static_cast<int64_t>(last), "{} must be 0 to {}, got {}", name,
             static_cast<int64_t>(last), value);
  return static_cast<Enum>(value);
}

cuda::GroupedType type_of(const char* name, const Tensor& tensor) {
  if (tensor.dtype() == kDTypes.bfloat16) {
    return cuda::GroupedType::kBFloat16;
  }
  if (tensor.dtype() == kDTypes.float16) {
    return cuda::GroupedType::kFloat16;
  }
  if (tensor.dtype() == kDTypes.float32) {
    return cuda::GroupedType::kFloat32;
  }
  MC_REQUIRE(tensor.dtype() == kDTypes.float8, "{} must be bfloat16, float16, float32 or e4m3",
             name);
  return cuda::GroupedType::kFloat8;
}

// An optional vector with an entry per expert.
void check_entries(const char* name,
                   const std::optional<Tensor>& entries,
                   const char* kind,
                   int32_t dtype,
                   int64_t num_experts) {
  MC_REQUIRE(!entries || (entries->dtype() == dtype && entries->numel() == num_experts),
             "{} must have {} {} entries, one per expert, got {}", name, num_experts, kind,
             shape_text(*entries));
}

}  // namespace

void grouped_gemm_(Tensor a,
                   Tensor b,
                   std::optional<Tensor> m_splits,
                   Tensor out,
                   int64_t product,
                   std::optional<Tensor> a_scale,
                   std::optional<Tensor> b_scale,
                   int64_t num_rows,
                   bool accumulate,
                   std::optional<Tensor> mask,
                   bool clear_tail,
                   std::optional<Tensor> first_row,
                   int64_t expected_rows,
                   int64_t tile,
                   bool along_columns) {
  const auto kind = enumerator("product", product, moe::GroupedProduct::kWeightGrad);
  const Tensor& w = kind == moe::GroupedProduct::kWeightGrad ? out : b;
  MC_REQUIRE(w.dim() == 3, "weights must be (E, N, K), got {}", shape_text(w));
  MC_REQUIRE(out.is_contiguous(), "out must be contiguous");
  const int64_t num_experts = w.size(0), out_features = w.size(1), in_features = w.size(2);
  check_entries("m_splits", m_splits, "int64", kDTypes.int64, num_experts);
  check_entries("mask", mask, "bool", kDTypes.boolean, num_experts);
  check_scalar("first_row", first_row);
  const Device device(out, a, b, m_splits, a_scale, b_scale, mask, first_row);
  a = device.aligned(std::move(a));
  b = device.aligned(std::move(b));
  m_splits = device.contiguous(std::move(m_splits));
  mask = device.contiguous(std::move(mask));
  const size_t workspace_bytes = cuda::grouped_gemm_workspace_bytes(num_experts);
  // From torch's allocator, which reuses this memory in the order of the stream only.
  Tensor workspace = device.empty({static_cast<int64_t>(workspace_bytes)}, kDTypes.uint8);
  cuda::grouped_gemm({.product = kind,
                      .a = a.data<void>(),
                      .b = b.data<void>(),
                      .a_scale = data_of<float>(a_scale),
                      .b_scale = data_of<float>(b_scale),
                      .m_splits = data_of<int64_t>(m_splits),
                      .first_row = data_of<int64_t>(first_row),
                      .d = out.mutable_data<void>(),
                      .operand = type_of("a", a),
                      .result = type_of("out", out),
                      .num_rows = num_rows,
                      .expected_rows = expected_rows,
                      .num_experts = num_experts,
                      .out_features = out_features,
                      .in_features = in_features,
                      .accumulate = accumulate,
                      .accumulate_mask = data_of<uint8_t>(mask),
                      .clear_tail = clear_tail,
                      .plan = {.tile = enumerator("tile", tile, cuda::GroupedTile::kSquare),
                               .along_columns = along_columns},
                      .workspace = workspace.mutable_data<void>(),
                      .workspace_bytes = workspace_bytes},
                     device.stream());
}

}  // namespace megacore::ops
