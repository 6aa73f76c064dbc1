#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "bindings.h"
#include "megacore/base/check.h"
#include "megacore/cuda/clone_exchange.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

using cuda::CloneView;

// `sizes`: ranks, slots of a rank, experts, position, bytes of an expert's projections and of their
// gradients.
CloneView view_of(uintptr_t memory,
                  uintptr_t failure,
                  const std::vector<int64_t>& sizes,
                  uintptr_t slot_expert,
                  double timeout_s) {
  MC_REQUIRE(sizes.size() == 8, "clones have eight sizes, not {}", sizes.size());
  return {.memory = device_pointer<std::byte* const>(memory),
          .failure = device_pointer<unsigned long long>(failure),
          .layout = {.num_slots = sizes[1],
                     .weight_bytes = {sizes[4], sizes[5]},
                     .grad_bytes = {sizes[6], sizes[7]}},
          .table = {.slot_expert = device_pointer<const int64_t>(slot_expert),
                    .num_ranks = sizes[0],
                    .num_slots = sizes[1],
                    .num_experts = sizes[2],
                    .position = sizes[3]},
          .timeout_ns = static_cast<int64_t>(timeout_s * 1e9)};
}

// Every call takes what describes the ranks, a projection, a tensor that some need, and a stream.
template <typename Run>
void define(py::module_& module, const char* name, Run run) {
  def_kernel(
      module, name,
      [run](uintptr_t memory, uintptr_t failure, const std::vector<int64_t>& sizes,
            uintptr_t slot_expert, double timeout_s, int64_t projection, uintptr_t tensor,
            uintptr_t stream) {
        run(view_of(memory, failure, sizes, slot_expert, timeout_s), projection, tensor,
            stream_handle(stream));
      },
      "memory", "failure", "sizes", "slot_expert", "timeout_s", "projection", "tensor", "stream");
}

}  // namespace

void bind_clones(py::module_& module) {
  define(module, "clones_open", [](const CloneView& view, int64_t, uintptr_t, cudaStream_t stream) {
    cuda::clones_open(view, stream);
  });
  define(module, "clones_push",
         [](const CloneView& view, int64_t projection, uintptr_t weights, cudaStream_t stream) {
           cuda::clones_push(view, projection, device_pointer<const std::byte>(weights), stream);
         });
  define(module, "clones_wait",
         [](const CloneView& view, int64_t projection, uintptr_t, cudaStream_t stream) {
           cuda::clones_wait(view, projection, stream);
         });
  define(module, "clones_reserve_grads",
         [](const CloneView& view, int64_t projection, uintptr_t, cudaStream_t stream) {
           cuda::clones_reserve_grads(view, projection, stream);
         });
  define(module, "clones_offer_grads",
         [](const CloneView& view, int64_t projection, uintptr_t, cudaStream_t stream) {
           cuda::clones_offer_grads(view, projection, stream);
         });
  define(module, "clones_collect",
         [](const CloneView& view, int64_t projection, uintptr_t total, cudaStream_t stream) {
           cuda::clones_collect(view, projection, device_pointer<float>(total), stream);
         });
}

}  // namespace megacore::bindings
