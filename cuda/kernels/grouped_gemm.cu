// The set-up kernel of grouped products, the checks that CUTLASS leaves to its caller, and the
// choice of the kernel.

#include <algorithm>
#include <array>
#include <limits>

#include "grouped_gemm_unit.h"
#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/check.h"
#include "megacore/cuda/grouped_gemm.h"

namespace megacore::cuda {
namespace {

using moe::GroupedProduct;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPerThread = static_cast<int>(moe::kMaxGroupedExperts) / kThreads;

struct SetUp {
  moe::GroupedProblem problem;
  moe::GroupedBases bases;
  moe::GroupedArguments arguments;
  const int64_t* m_splits;
  const int64_t* first_row;
  const uint8_t* accumulate_mask;
  bool accumulate;
};

// Shared by the threads of a block: where the rows of each expert start, and how many they are.
struct AllRows {
  int32_t start[moe::kMaxGroupedExperts];
  int32_t count[moe::kMaxGroupedExperts];
  int64_t warp_sum[kWarps];
};

__device__ bool accumulates(const SetUp& set_up, int expert) {
  return set_up.accumulate_mask == nullptr ? set_up.accumulate
                                           : set_up.accumulate_mask[expert] != 0;
}

// Each thread sums its experts; a scan over the threads gives where its first one starts.
__device__ void find_rows(const SetUp& set_up, AllRows& rows) {
  const int num_experts = static_cast<int>(set_up.problem.num_experts);
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int64_t counts[kPerThread];
  int64_t own = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int expert = first + i;
    counts[i] = expert < num_experts
                    ? moe::usable_count_of(set_up.m_splits, expert, set_up.problem.num_rows)
                    : 0;
    own += counts[i];
  }
  int64_t sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffU, sum, static_cast<unsigned>(distance));
    sum += lane >= distance ? other : 0;
  }
  if (lane == 31) {
    rows.warp_sum[warp] = sum;
  }
  __syncthreads();
  int64_t end = sum - own + moe::rows_before(set_up.first_row, set_up.problem.num_rows);
  for (int before = 0; before < warp; ++before) {
    end += rows.warp_sum[before];
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int expert = first + i;
    end += counts[i];
    if (expert < num_experts) {
      const moe::GroupRows found = moe::rows_of_group(end, counts[i], set_up.problem.num_rows);
      rows.start[expert] = static_cast<int32_t>(found.start);
      rows.count[expert] = static_cast<int32_t>(found.count);
    }
  }
  __syncthreads();
}

__device__ void write_arguments(const SetUp& set_up, const AllRows& rows) {
  const int num_experts = static_cast<int>(set_up.problem.num_experts);
  for (int expert = static_cast<int>(threadIdx.x); expert < num_experts; expert += kThreads) {
    int64_t place = 0;
    for (int other = 0; other < num_experts; ++other) {
      place += moe::goes_first(set_up.problem.product, other, rows.count[other], expert,
                               rows.count[expert]);
    }
    moe::write_group(set_up.arguments, place, set_up.problem, set_up.bases, expert,
                     {rows.start[expert], rows.count[expert]}, accumulates(set_up, expert));
  }
}

// Sets bytes [begin, end) of the result to zero, both multiples of 16; all blocks but the first
// share the work.
__device__ void clear_bytes(const SetUp& set_up, int64_t begin, int64_t end) {
  uint4* memory = reinterpret_cast<uint4*>(set_up.bases.d);
  const int64_t step = int64_t{gridDim.x - 1} * kThreads;
  const int64_t first = begin / 16 + int64_t{blockIdx.x - 1} * kThreads + threadIdx.x;
  for (int64_t i = first; i < end / 16; i += step) {
    memory[i] = make_uint4(0, 0, 0, 0);
  }
}

// What no product writes: rows of nobody, and weights of experts without rows.
__device__ void clear_rest(const SetUp& set_up, const AllRows& rows) {
  const moe::GroupedProblem& problem = set_up.problem;
  const int num_experts = static_cast<int>(problem.num_experts);
  if (problem.product != GroupedProduct::kWeightGrad) {
    const int64_t features =
        problem.product == GroupedProduct::kForward ? problem.out_features : problem.in_features;
    const int64_t row_bytes = features * problem.result_bytes;
    const int64_t used = int64_t{rows.start[num_experts - 1]} + rows.count[num_experts - 1];
    clear_bytes(set_up, used * row_bytes, problem.num_rows * row_bytes);
    return;
  }
  const int64_t weight_bytes = problem.out_features * problem.in_features * problem.result_bytes;
  for (int expert = 0; expert < num_experts; ++expert) {
    if (rows.count[expert] == 0 && !accumulates(set_up, expert)) {
      clear_bytes(set_up, expert * weight_bytes, (expert + 1) * weight_bytes);
    }
  }
}

__global__ void __launch_bounds__(kThreads) set_up_kernel(SetUp set_up) {
  __shared__ AllRows rows;
  find_rows(set_up, rows);
  if (blockIdx.x == 0) {
    write_arguments(set_up, rows);
  } else {
    clear_rest(set_up, rows);
  }
}

int64_t bytes_of(GroupedType type) {
  return type == GroupedType::kFloat8 ? 1 : (type == GroupedType::kFloat32 ? 4 : 2);
}

bool is_weight_grad(const GroupedGemmParams& params) {
  return params.product == GroupedProduct::kWeightGrad;
}

moe::GroupedProblem problem_of(const GroupedGemmParams& params) {
  return {.product = params.product,
          .num_rows = params.num_rows,
          .num_experts = params.num_experts,
          .out_features = params.out_features,
          .in_features = params.in_features,
          .operand_bytes = bytes_of(params.operand),
          .result_bytes = bytes_of(params.result)};
}

// ---- checks -------------------------------------------------------------------------------------
// CUTLASS ends the process, or computes nonsense, where these do not hold.

constexpr int64_t kRowLimit = int64_t{1} << 31;

void require_features(const char* name, int64_t value, int64_t unit) {
  MC_REQUIRE(value >= unit && value % unit == 0 && value < kRowLimit,
             "{} is {}; a grouped product needs a multiple of {}, so that rows are aligned to 16 "
             "bytes; the nearest is {}",
             name, value, unit, std::max<int64_t>(unit, (value + unit / 2) / unit * unit));
}

void require_aligned(const char* name, const void* pointer, uintptr_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  MC_REQUIRE(address != 0 && address % bytes == 0,
             "{} lies at address {}; a grouped product needs one that is set and a multiple of {}",
             name, address, bytes);
}

void require_scaled(const GroupedGemmParams& params) {
  const bool is_weight = is_weight_grad(params);
  MC_REQUIRE(is_weight || params.product == GroupedProduct::kForward,
             "the input gradient of 8-bit factors is a forward product with transposed weights");
  MC_REQUIRE(params.result == (is_weight ? GroupedType::kFloat32 : GroupedType::kBFloat16),
             "the result of 8-bit factors must be bfloat16, or float32 for a weight gradient");
  MC_REQUIRE(is_weight || (!params.accumulate && params.accumulate_mask == nullptr),
             "only a weight gradient in float32 can be added to what is there");
  MC_REQUIRE(params.first_row == nullptr, "8-bit factors must begin with the first row");
  if (params.num_rows > 0) {
    require_aligned("the scales of the first factor", params.a_scale, alignof(float));
  }
  require_aligned("the scales of the second factor", params.b_scale, alignof(float));
}

void require_types(const GroupedGemmParams& params) {
  if (params.operand == GroupedType::kFloat8) {
    require_scaled(params);
    return;
  }
  MC_REQUIRE(params.operand != GroupedType::kFloat32,
             "the factors are float32; grouped products take bfloat16, float16 and 8-bit floats");
  const bool is_wide = is_weight_grad(params) && params.result == GroupedType::kFloat32;
  MC_REQUIRE(params.result == params.operand || is_wide,
             "the result must have the type of the factors; only a weight gradient may be float32");
  MC_REQUIRE(is_wide || (!params.accumulate && params.accumulate_mask == nullptr),
             "only a weight gradient in float32 can be added to what is there");
}

void require_valid(const GroupedGemmParams& params) {
  MC_REQUIRE(params.num_experts >= 1 && params.num_experts <= moe::kMaxGroupedExperts,
             "num_experts is {}; one launch takes 1 to {}", params.num_experts,
             moe::kMaxGroupedExperts);
  MC_REQUIRE(params.num_rows >= 0 && params.num_rows < kRowLimit,
             "num_rows must be at least 0 and below 2^31, got {}", params.num_rows);
  const int64_t unit = params.operand == GroupedType::kFloat8 ? 16 : 8;
  require_features("out_features", params.out_features, unit);
  require_features("in_features", params.in_features, unit);
  require_types(params);
  if (params.m_splits != nullptr || params.num_experts != 1) {
    require_aligned("m_splits", params.m_splits, alignof(int64_t));
  }
  require_aligned("the workspace", params.workspace, moe::kGroupedAlignment);
  if (params.num_rows > 0) {
    require_aligned("the first factor", params.a, 16);
    require_aligned("the second factor", params.b, 16);
  }
  if (params.num_rows > 0 || is_weight_grad(params)) {
    require_aligned("the result", params.d, 16);
  }
}

// ---- choice of the kernel -----------------------------------------------------------------------

struct Device {
  int index = 0;
  int major = 0;
  int minor = 0;
  int num_processors = 0;
};

Device ask_device(int index) {
  Device device{.index = index};
  const auto ask = [&](int& value, cudaDeviceAttr attribute) {
    check(cudaDeviceGetAttribute(&value, attribute, device.index), "asking for the device");
  };
  ask(device.major, cudaDevAttrComputeCapabilityMajor);
  ask(device.minor, cudaDevAttrComputeCapabilityMinor);
  ask(device.num_processors, cudaDevAttrMultiProcessorCount);
  return device;
}

// Facts of a device never change, and asking for them would be a part of every launch's time.
const Device& current_device() {
  int index = 0;
  check(cudaGetDevice(&index), "asking for the current device");
  thread_local Device known{.index = -1};
  if (known.index != index) {
    known = ask_device(index);
  }
  return known;
}

struct TileRule {
  bool is_weight_grad;
  int64_t most_rows;     // of an expert, on average
  int64_t most_columns;  // of the result
  GroupedTile tile;
};

// Tiles of products on Hopper: the first rule that fits decides. A tile covers 64 (narrow), 128
// (middle) or 256 (wide and square, in pairs) rows of the result, and the wider one reads its
// operands less often. Square tiles compute one tile while another is written, which counts where
// there is little to sum (weight gradients of few rows) or little to write in a row. Not measured:
// the limits follow from filled rows times the rate at which a tile's operands arrive. A sweep over
// plans (bench_gpu_grouped_gemm.py) can replace them.
constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr std::array<TileRule, 6> kHopperTiles = {{
    {.is_weight_grad = true, .most_rows = 2048, .most_columns = kAny, .tile = GroupedTile::kSquare},
    {.is_weight_grad = true, .most_rows = kAny, .most_columns = kAny, .tile = GroupedTile::kWide},
    {.is_weight_grad = false, .most_rows = 64, .most_columns = kAny, .tile = GroupedTile::kNarrow},
    {.is_weight_grad = false, .most_rows = kAny, .most_columns = 128, .tile = GroupedTile::kSquare},
    {.is_weight_grad = false, .most_rows = 640, .most_columns = kAny, .tile = GroupedTile::kMiddle},
    {.is_weight_grad = false, .most_rows = kAny, .most_columns = kAny, .tile = GroupedTile::kWide},
}};

[[noreturn]] void report_missing(const Device& device) {
  if (device.minor != 0 || (device.major != 9 && device.major != 10)) {
    throw std::runtime_error(
        base::format_text("no grouped product for a device of compute capability {}.{}: they exist "
                          "for 9.0 and 10.0 only",
                          device.major, device.minor));
  }
  std::string built;
  for (const std::string& arch : grouped_gemm_archs()) {
    built += (built.empty() ? "sm_" : ", sm_") + arch;
  }
  throw std::runtime_error(base::format_text(
      "no grouped product for a device of compute capability {}.{}: this build has {}",
      device.major, device.minor,
      built.empty() ? "none, because CUTLASS's headers were missing (set CUTLASS_ROOT and build "
                      "again)"
                    : built));
}

GroupedUnit unit_for([[maybe_unused]] GroupedTile tile, const Device& device) {
#if defined(MEGACORE_GROUPED_GEMM_SM90)
  if (device.major == 9 && device.minor == 0) {
    switch (tile) {
      case GroupedTile::kNarrow:
        return grouped_unit_sm90_narrow();
      case GroupedTile::kMiddle:
        return grouped_unit_sm90_middle();
      case GroupedTile::kSquare:
        return grouped_unit_sm90_square();
      default:
        return grouped_unit_sm90_wide();
    }
  }
#endif
#if defined(MEGACORE_GROUPED_GEMM_SM100)
  if (device.major == 10 && device.minor == 0) {
    return grouped_unit_sm100_wide();
  }
#endif
  report_missing(device);
}

GroupedUnit unit_for_scaled(const Device& device) {
#if defined(MEGACORE_GROUPED_GEMM_SM90)
  if (device.major == 9 && device.minor == 0) {
    return grouped_unit_sm90_fp8();
  }
#endif
  throw std::runtime_error(base::format_text(
      "no grouped product of 8-bit factors for a device of compute capability {}.{}: only "
      "capability 9.0 has one, in builds with CUTLASS",
      device.major, device.minor));
}

size_t arguments_bytes(int64_t num_experts) {
  return static_cast<size_t>(moe::grouped_arguments_bytes(num_experts));
}

void launch_set_up(const GroupedGemmParams& params, const Device& device, cudaStream_t stream) {
  SetUp set_up{};
  set_up.problem = problem_of(params);
  set_up.bases = {reinterpret_cast<uint64_t>(params.a), reinterpret_cast<uint64_t>(params.b),
                  reinterpret_cast<uint64_t>(params.d), reinterpret_cast<uint64_t>(params.a_scale),
                  reinterpret_cast<uint64_t>(params.b_scale)};
  set_up.arguments = moe::grouped_arguments_at(params.workspace, params.num_experts);
  set_up.m_splits = params.m_splits;
  set_up.first_row = params.first_row;
  set_up.accumulate_mask = params.accumulate_mask;
  set_up.accumulate = params.accumulate;
  const bool overwrites = !params.accumulate || params.accumulate_mask != nullptr;
  const bool clears = is_weight_grad(params) ? overwrites : params.clear_tail;
  const int blocks = clears ? 1 + 2 * device.num_processors : 1;
  launch("the set-up of a grouped product", set_up_kernel, {.blocks = blocks, .threads = kThreads},
         stream, set_up);
}

}  // namespace

std::vector<std::string> grouped_gemm_archs() {
  std::vector<std::string> archs;
#if defined(MEGACORE_GROUPED_GEMM_SM90)
  archs.emplace_back("90a");
#endif
#if defined(MEGACORE_GROUPED_GEMM_SM100)
  archs.emplace_back("100a");
#endif
  return archs;
}

size_t grouped_gemm_workspace_bytes(int64_t num_experts) {
  const Device& device = current_device();
  size_t scratch = 0;
  for (const GroupedTile tile :
       {GroupedTile::kWide, GroupedTile::kMiddle, GroupedTile::kNarrow, GroupedTile::kSquare}) {
    scratch = std::max(scratch, unit_for(tile, device).scratch_bytes(device.num_processors));
  }
  if (device.major == 9) {
    scratch = std::max(scratch, unit_for_scaled(device).scratch_bytes(device.num_processors));
  }
  return arguments_bytes(num_experts) + scratch;
}

GroupedPlan choose_grouped_plan(const moe::GroupedProblem& problem,
                                int64_t expected_rows,
                                int major) {
  if (major != 9) {
    return {GroupedTile::kWide, false};
  }
  const bool is_weight_grad = problem.product == GroupedProduct::kWeightGrad;
  const int64_t rows = expected_rows > 0
                           ? expected_rows
                           : problem.num_rows / std::max(problem.num_experts, int64_t{1});
  const int64_t columns =
      problem.product == GroupedProduct::kForward ? problem.out_features : problem.in_features;
  const auto* rule = std::ranges::find_if(kHopperTiles, [=](const TileRule& each) {
    return each.is_weight_grad == is_weight_grad && rows <= each.most_rows &&
           columns <= each.most_columns;
  });
  return {rule->tile, false};
}

void grouped_gemm_set_up(const GroupedGemmParams& params, cudaStream_t stream) {
  require_valid(params);
  MC_REQUIRE(params.workspace_bytes >= arguments_bytes(params.num_experts),
             "the workspace has {} bytes; the arguments need {}", params.workspace_bytes,
             arguments_bytes(params.num_experts));
  launch_set_up(params, current_device(), stream);
}

void grouped_gemm(const GroupedGemmParams& params, cudaStream_t stream) {
  require_valid(params);
  if (params.num_rows == 0 && !is_weight_grad(params)) {
    return;  // a result without rows
  }
  const Device& device = current_device();
  GroupedPlan plan = params.plan;
  if (plan.tile == GroupedTile::kAuto) {
    plan = choose_grouped_plan(problem_of(params), params.expected_rows, device.major);
  }
  if (is_weight_grad(params) && plan.tile != GroupedTile::kSquare) {
    plan.tile = GroupedTile::kWide;  // the only other one for weight gradients
  }
  const GroupedUnit unit = params.operand == GroupedType::kFloat8 ? unit_for_scaled(device)
                                                                  : unit_for(plan.tile, device);
  const size_t needed =
      arguments_bytes(params.num_experts) + unit.scratch_bytes(device.num_processors);
  MC_REQUIRE(params.workspace_bytes >= needed, "the workspace has {} bytes; this product needs {}",
             params.workspace_bytes, needed);
  launch_set_up(params, device, stream);
  if (params.num_rows == 0) {
    return;
  }
  unit.launch(
      {.product = params.product,
       .operand = params.operand,
       .result = params.result,
       .along_columns = plan.along_columns,
       .num_experts = static_cast<int>(params.num_experts),
       .arguments = moe::grouped_arguments_at(params.workspace, params.num_experts),
       .scratch = static_cast<char*>(params.workspace) + arguments_bytes(params.num_experts),
       .device = device.index,
       .num_processors = device.num_processors,
       .stream = stream});
}

}  // namespace megacore::cuda
