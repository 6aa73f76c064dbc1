#include "megacore/cuda/clone_exchange.h"

#include "device.h"
#include "gpu_operations.h"

namespace megacore::ops {
namespace {

// Arguments of all steps: `tensor` is weights or a sum of gradients of a projection.
struct Step {
  using Arguments = std::tuple<Tensor,
                               Tensor,
                               std::optional<Tensor>,
                               std::optional<Tensor>,
                               int64_t,
                               int64_t,
                               int64_t,
                               int64_t,
                               int64_t,
                               int64_t,
                               int64_t,
                               int64_t,
                               double>;
  Tensor memory;  // (R,) addresses
  Tensor failure;
  std::optional<Tensor> slot_expert;
  std::optional<Tensor> tensor;
  int64_t projection;
  int64_t num_slots;
  int64_t num_experts;
  int64_t position;
  int64_t fc1_bytes;
  int64_t fc2_bytes;
  int64_t fc1_grad_bytes;
  int64_t fc2_grad_bytes;
  double timeout_s;

  cuda::CloneView view() const {
    MC_REQUIRE(memory.dim() == 1 && memory.dtype() == kDTypes.int64 && memory.is_contiguous(),
               "memory must be (R,) int64, contiguous, got {}", shape_text(memory));
    check_scalar("failure", failure);
    MC_REQUIRE(projection == 0 || projection == 1, "projection must be 0 or 1, got {}", projection);
    return {.memory = memory.data<std::byte* const>(),
            .failure = failure.mutable_data<unsigned long long>(),
            .layout = {.num_slots = num_slots,
                       .weight_bytes = {fc1_bytes, fc2_bytes},
                       .grad_bytes = {fc1_grad_bytes, fc2_grad_bytes}},
            .table = {.slot_expert = data_of<int64_t>(slot_expert),
                      .num_ranks = memory.size(0),
                      .num_slots = num_slots,
                      .num_experts = num_experts,
                      .position = position},
            .timeout_ns = static_cast<int64_t>(timeout_s * 1e9)};
  }
  void check_table() const {
    MC_REQUIRE(slot_expert, "slot_expert must be given");
    check_integers("slot_expert", *slot_expert, {memory.size(0), num_slots});
    MC_REQUIRE(slot_expert->is_contiguous(), "slot_expert must be contiguous");
  }
  // The tensor, of `bytes` for each expert of a rank.
  const Tensor& checked_tensor(int64_t bytes) const {
    check_table();
    const int64_t local = memory.size(0) > 0 ? num_experts / memory.size(0) : 0;
    const int64_t width = tensor && tensor->dtype() == kDTypes.float32 ? 4 : 2;
    MC_REQUIRE(tensor && tensor->is_contiguous() && tensor->numel() * width == local * bytes,
               "tensor must be contiguous, of {} bytes for each of {} experts", bytes, local);
    static_cast<void>(float_type(*tensor));
    return *tensor;
  }
};

// A step without a table or tensor, one of a projection with a table, or one with a tensor too.
template <auto kCall, bool kHasTable = false>
void step(Step step) {
  const Device device(step.memory, step.failure, step.slot_expert, step.tensor);
  if constexpr (kHasTable) {
    step.check_table();
  }
  if constexpr (std::is_invocable_v<decltype(kCall), cuda::CloneView, cudaStream_t>) {
    kCall(step.view(), device.stream());
  } else {
    kCall(step.view(), step.projection, device.stream());
  }
}

void push(Step step) {
  const Device device(step.memory, step.failure, step.slot_expert, step.tensor);
  const cuda::CloneView view = step.view();
  const Tensor& weights = step.checked_tensor(view.layout.weight_bytes[step.projection]);
  cuda::clones_push(view, step.projection, weights.data<std::byte>(), device.stream());
}

void collect(Step step) {
  const Device device(step.memory, step.failure, step.slot_expert, step.tensor);
  const cuda::CloneView view = step.view();
  const Tensor& total = step.checked_tensor(view.layout.grad_bytes[step.projection]);
  MC_REQUIRE(total.dtype() == kDTypes.float32, "the sum of gradients must be float32");
  cuda::clones_collect(view, step.projection, total.mutable_data<float>(), device.stream());
}

constexpr Kernel kCloneKernels[] = {
    {"_clones_open", kernel_of<step<cuda::clones_open>>},
    {"_clones_push", kernel_of<push>},
    {"_clones_wait", kernel_of<step<cuda::clones_wait, true>>},
    {"_clones_reserve_grads", kernel_of<step<cuda::clones_reserve_grads>>},
    {"_clones_offer_grads", kernel_of<step<cuda::clones_offer_grads, true>>},
    {"_clones_collect", kernel_of<collect>},
};

}  // namespace

std::span<const Kernel> clone_kernels() { return kCloneKernels; }

}  // namespace megacore::ops
