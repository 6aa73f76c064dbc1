// From our description of a grouped product to CUTLASS's: the only file that knows CUTLASS.
// Included by one translation unit per architecture and family of tiles.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <new>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/detail/blockwise_scale_layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/kernel_hardware_info.hpp"
#include "grouped_gemm_unit.h"
#include "megacore/cuda/check.h"

namespace megacore::cuda {

using Shape3 = cute::Shape<int, int, int>;
using GroupShapes = cutlass::gemm::GroupProblemShape<Shape3>;
static_assert(sizeof(Shape3) == 12, "shapes are written as three 32-bit numbers");

using Float8 = cutlass::float_e4m3_t;

// Row-major matrices throughout; a transposed factor is a column-major one to CUTLASS. Operands of
// the weight gradient have their rows as depth, so that its strides, not its alignment, depend on
// the counts.
template <moe::GroupedProduct, class Operand>
struct Layouts;
template <class Operand>
struct Layouts<moe::GroupedProduct::kForward, Operand> {
  using A = cutlass::layout::RowMajor*;
  using B = cutlass::layout::ColumnMajor*;
};
template <class Operand>
struct Layouts<moe::GroupedProduct::kInputGrad, Operand> {
  using A = cutlass::layout::RowMajor*;
  using B = cutlass::layout::RowMajor*;
};
template <class Operand>
struct Layouts<moe::GroupedProduct::kWeightGrad, Operand> {
  using A = cutlass::layout::ColumnMajor*;
  using B = cutlass::layout::RowMajor*;
};

// Factors of 8 bits are consecutive along the depth, as the instructions want them, and so are the
// scales of a row or block of weights. In the weight gradient both factors have the scales of one
// block of rows one behind the other.
template <>
struct Layouts<moe::GroupedProduct::kForward, Float8> {
  using Scales = cutlass::detail::
      Sm90BlockwiseScaleConfig<1, 128, 128, cute::GMMA::Major::K, cute::GMMA::Major::K>;
  using A = cute::tuple<cutlass::layout::RowMajor*, decltype(Scales::deduce_layoutSFA())*>;
  using B = cute::tuple<cutlass::layout::ColumnMajor*, decltype(Scales::deduce_layoutSFB())*>;
};
template <>
struct Layouts<moe::GroupedProduct::kWeightGrad, Float8> {
  using Scales = cutlass::detail::
      Sm90BlockwiseScaleConfig<1, 1, 128, cute::GMMA::Major::MN, cute::GMMA::Major::MN>;
  using A = cute::tuple<cutlass::layout::RowMajor*, decltype(Scales::deduce_layoutSFA())*>;
  using B = cute::tuple<cutlass::layout::ColumnMajor*, decltype(Scales::deduce_layoutSFB())*>;
};

// One kernel. Family names the architecture, tile, cluster and schedules. A float32 result reads
// what it adds to; one of 16 bits overwrites.
template <class Family, moe::GroupedProduct product, class Operand, class Result>
struct GroupedKernel {
  static constexpr bool kReadsResult = std::is_same_v<Result, float>;
  static constexpr int kOperandAlignment = 16 / static_cast<int>(sizeof(Operand));
  static constexpr int kResultAlignment = 16 / static_cast<int>(sizeof(Result));
  using Source = std::conditional_t<kReadsResult, Result, void>;
  using ResultLayout = cutlass::layout::RowMajor;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      typename Family::Arch,
      cutlass::arch::OpClassTensorOp,
      typename Family::Tile,
      typename Family::Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto,
      float,
      float,
      Source,
      ResultLayout*,
      kResultAlignment,
      Result,
      ResultLayout*,
      kResultAlignment,
      typename Family::EpilogueSchedule>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      typename Family::Arch,
      cutlass::arch::OpClassTensorOp,
      Operand,
      typename Layouts<product, Operand>::A,
      kOperandAlignment,
      Operand,
      typename Layouts<product, Operand>::B,
      kOperandAlignment,
      float,
      typename Family::Tile,
      typename Family::Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      typename Family::KernelSchedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<GroupShapes, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;
  static_assert(sizeof(StrideA) == 8 && sizeof(StrideB) == 8 && sizeof(StrideD) == 8,
                "strides are written as one 64-bit number");

  static typename Gemm::Arguments arguments(const GroupedLaunch& launch) {
    const moe::GroupedArguments& from = launch.arguments;
    typename Gemm::Arguments to{};
    to.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    to.problem_shape = {launch.num_experts, reinterpret_cast<Shape3*>(from.shapes), nullptr};
    to.mainloop.ptr_A = reinterpret_cast<const Operand**>(from.a);
    to.mainloop.dA = reinterpret_cast<StrideA*>(from.a_stride);
    to.mainloop.ptr_B = reinterpret_cast<const Operand**>(from.b);
    to.mainloop.dB = reinterpret_cast<StrideB*>(from.b_stride);
    if constexpr (std::is_same_v<Operand, Float8>) {
      // The layouts of the scales are left out: the kernel derives them from the shape of a group.
      to.mainloop.ptr_SFA = reinterpret_cast<const float**>(from.a_scale);
      to.mainloop.ptr_SFB = reinterpret_cast<const float**>(from.b_scale);
    }
    to.epilogue.thread.alpha = 1.0F;
    to.epilogue.thread.beta = 0.0F;
    if constexpr (kReadsResult) {
      // One factor per group. CUTLASS decides once per block whether the warp that loads the old
      // result takes part, and every other warp counts on the same answer; with a stride it is yes,
      // whatever the factors are (Sm90TreeVisitor::is_producer_load_needed), so nobody waits for a
      // warp that left. For each tile, loader and adders then read the factor of its group; where
      // that is 0, the loader passes the tile on without a load and the adders take zeros for the
      // old result, so that NaN in it does no harm.
      to.epilogue.thread.beta_ptr = from.beta;
      to.epilogue.thread.dBeta = {cute::_0{}, cute::_0{}, 1};
      to.epilogue.ptr_C = reinterpret_cast<const Result**>(from.d);
      to.epilogue.dC = reinterpret_cast<StrideD*>(from.d_stride);
    }
    to.epilogue.ptr_D = reinterpret_cast<Result**>(from.d);
    to.epilogue.dD = reinterpret_cast<StrideD*>(from.d_stride);
    using Order = std::remove_reference_t<decltype(to.scheduler.raster_order)>;
    to.scheduler.raster_order = launch.along_columns ? Order::AlongN : Order::AlongM;
    to.hw_info.device_id = launch.device;
    to.hw_info.sm_count = launch.num_processors;
    return to;
  }

  static size_t scratch_bytes(int num_processors) {
    GroupedLaunch launch{};
    launch.num_experts = 1;
    launch.num_processors = num_processors;
    return Kernel::get_workspace_size(arguments(launch));
  }

  // What a device must be told or asked once: more shared memory than usual, and how many clusters
  // of such blocks it runs at a time. Kept per device; asking twice at the same time does no harm.
  static int clusters_at_a_time(int device) {
    static std::array<std::atomic<int>, 64> known{};
    std::atomic<int>* slot =
        device >= 0 && device < 64 ? &known[static_cast<size_t>(device)] : nullptr;
    if (slot != nullptr && slot->load(std::memory_order_acquire) > 0) {
      return slot->load(std::memory_order_acquire);
    }
    const auto kernel = reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Kernel::SharedStorageSize),
          "preparing a grouped product that needs {} bytes of shared memory",
          Kernel::SharedStorageSize);
    // A kernel compiled for a target without this chip's instructions is a stub that prints a line;
    // it needs a third of the registers of any real one.
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "looking at a grouped product's kernel");
    if (attributes.numRegs < 48) {
      throw std::logic_error(base::format_text(
          "megacore bug: the kernel of a grouped product is a stub ({} registers); it "
          "was compiled for the wrong target",
          attributes.numRegs));
    }
    using Cluster = typename Family::Cluster;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cute::size<0>(Cluster{});
    attribute.val.clusterDim.y = cute::size<1>(Cluster{});
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = {attribute.val.clusterDim.x, attribute.val.clusterDim.y, 1};
    config.blockDim = Kernel::get_block_shape();
    config.dynamicSmemBytes = Kernel::SharedStorageSize;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config),
          "asking how many clusters of a grouped product run at a time");
    if (slot != nullptr) {
      slot->store(clusters, std::memory_order_release);
    }
    return clusters;
  }

  // What a launch's parameters are made of; the addresses of the arguments follow from the first.
  struct Key {
    const void* shapes = nullptr;
    void* scratch = nullptr;
    int num_experts = -1;
    int device = -1;
    int num_processors = 0;
    bool along_columns = false;
    bool operator==(const Key&) const = default;
  };

  static typename Kernel::Params make_params(const GroupedLaunch& launch) {
    typename Gemm::Arguments to = arguments(launch);
    const int clusters = clusters_at_a_time(launch.device);
    const int fitting =
        launch.num_processors / static_cast<int>(cute::size(typename Family::Cluster{}));
    to.hw_info.max_active_clusters = clusters < fitting ? clusters : fitting;
    return Kernel::to_underlying_arguments(to, launch.scratch);
  }

  // Parameters take most of a launch's time on the host, for tensor maps that the kernel replaces.
  // They are a function of the key, so those of the latest workspaces are kept; torch's allocator
  // hands out the same ones step after step.
  static const typename Kernel::Params& params_of(const GroupedLaunch& launch) {
    constexpr size_t kKept = 8;
    struct Kept {
      Key key;
      alignas(typename Kernel::Params) std::byte params[sizeof(typename Kernel::Params)];
    };
    static_assert(std::is_trivially_destructible_v<typename Kernel::Params> &&
                      std::is_trivially_copyable_v<typename Kernel::Params>,
                  "parameters are kept as bytes");
    thread_local std::array<Kept, kKept> all{};
    thread_local size_t next = 0;
    const Key key{launch.arguments.shapes, launch.scratch,        launch.num_experts,
                  launch.device,           launch.num_processors, launch.along_columns};
    for (Kept& kept : all) {
      if (kept.key == key) {
        return *reinterpret_cast<const typename Kernel::Params*>(kept.params);
      }
    }
    Kept& kept = all[next];
    next = (next + 1) % kKept;
    kept.key = {};  // nothing is kept if the next line throws
    const auto* made = new (kept.params) typename Kernel::Params(make_params(launch));
    kept.key = key;
    return *made;
  }

  static void run(const GroupedLaunch& launch) {
    typename Kernel::Params params = params_of(launch);  // CUTLASS takes it by reference
    const cutlass::Status status = Gemm::run(params, launch.stream);
    if (status != cutlass::Status::kSuccess) {
      throw std::runtime_error(base::format_text("launching a grouped product failed: {}",
                                                 cutlass::cutlassGetStatusString(status)));
    }
  }
};

template <class Family, class Operand>
void launch_for_operand(const GroupedLaunch& launch) {
  using moe::GroupedProduct;
  if (launch.product == GroupedProduct::kForward) {
    GroupedKernel<Family, GroupedProduct::kForward, Operand, Operand>::run(launch);
  } else if (launch.product == GroupedProduct::kInputGrad) {
    GroupedKernel<Family, GroupedProduct::kInputGrad, Operand, Operand>::run(launch);
  } else if constexpr (Family::kHasWeightGrad) {
    if (launch.result == GroupedType::kFloat32) {
      GroupedKernel<Family, GroupedProduct::kWeightGrad, Operand, float>::run(launch);
    } else {
      GroupedKernel<Family, GroupedProduct::kWeightGrad, Operand, Operand>::run(launch);
    }
  } else {
    throw std::logic_error("megacore bug: this family of tiles has no weight gradient");
  }
}

template <class Family>
void launch_family(const GroupedLaunch& launch) {
  if (launch.operand == GroupedType::kFloat16) {
    launch_for_operand<Family, cutlass::half_t>(launch);
  } else {
    launch_for_operand<Family, cutlass::bfloat16_t>(launch);
  }
}

// The most that any kernel of the family needs: formats of equal size need the same.
template <class Family>
size_t family_scratch_bytes(int num_processors) {
  using moe::GroupedProduct;
  using Operand = cutlass::bfloat16_t;
  size_t bytes = GroupedKernel<Family, GroupedProduct::kForward, Operand, Operand>::scratch_bytes(
      num_processors);
  if constexpr (Family::kHasWeightGrad) {
    const size_t other =
        GroupedKernel<Family, GroupedProduct::kWeightGrad, Operand, float>::scratch_bytes(
            num_processors);
    bytes = bytes < other ? other : bytes;
  }
  return bytes;
}

}  // namespace megacore::cuda
