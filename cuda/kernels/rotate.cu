// Rotation of heads, alone or behind a norm of each head. Bound by memory: every element is read
// once and written once.

#include "column_sums.cuh"
#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/dense.h"
#include "row_io.cuh"

namespace megacore::cuda {
namespace {

// A constant, so that sums are the same on every GPU; two blocks for each of an H100's processors.
constexpr int64_t kSumBlocksOfHeads = 264;
constexpr int kWarpsOfBlock = kRowThreads / kWarp;

// Rotates elements of the first half, a, with those of the second, b; `direction` is -1 for the
// inverse. `pack` counts packs of a from the start of the half.
template <typename Float, int kPack>
__device__ __forceinline__ void turn(Pack<Float, kPack>& a,
                                     Pack<Float, kPack>& b,
                                     int64_t pack,
                                     const float* cos,
                                     const float* sin,
                                     float direction) {
  constexpr int kWide = kPack < 4 ? kPack : 4;
#pragma unroll
  for (int part = 0; part < kPack / kWide; ++part) {
    const Pack<float, kWide> c = load_pack<kWide>(cos, pack * (kPack / kWide) + part);
    const Pack<float, kWide> s = load_pack<kWide>(sin, pack * (kPack / kWide) + part);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const int at = part * kWide + i;
      const float left = widen(a.values[at]);
      const float right = widen(b.values[at]);
      const float turned = direction * s.values[i];
      narrow(left * c.values[i] - right * turned, a.values[at]);
      narrow(right * c.values[i] + left * turned, b.values[at]);
    }
  }
}

// Heads of all tokens, those of a group of a token one after the other: queries, key, value.
struct Heads {
  int slots;    // heads of a group
  int dim;      // elements of a head
  int half;     // rotated elements of a head's first half
  int pairs;    // of packs of a head
  int rotated;  // pairs

  __device__ Heads(const layers::HeadShape& shape, int pack)
      : slots(static_cast<int>(shape.q_per_kv) + 2),
        dim(static_cast<int>(shape.head_dim)),
        half(static_cast<int>(shape.num_rotated) / 2),
        pairs(dim / (2 * pack)),
        rotated(half / pack) {}
  // Packs of a pair: in a head that turns, those behind the rotated ones start at twice `rotated`.
  __device__ int first(int pair, bool turns) const { return turns ? pair : 2 * pair; }
  __device__ int second(int pair, bool turns) const {
    return turns ? rotated + pair : 2 * pair + 1;
  }
};

// The place of a head in q, k or v.
template <typename Float>
__device__ __forceinline__ Float* part_of(const RotateParams& params, int64_t index, int slot) {
  const int64_t q_per_kv = params.shape.q_per_kv;
  const int64_t dim = params.shape.head_dim;
  return slot < q_per_kv
             ? static_cast<Float*>(params.q) + (index * q_per_kv + slot) * dim
             : static_cast<Float*>(slot == q_per_kv ? params.k : params.v) + index * dim;
}

// A block takes a token at a time, a thread two packs of a head.
template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads) rotate_kernel(RotateParams params) {
  const layers::HeadShape& shape = params.shape;
  const Heads heads(shape, kPack);
  const int work = static_cast<int>(shape.num_groups) * heads.slots * heads.pairs;
  for (int64_t token = blockIdx.x; token < shape.num_tokens; token += gridDim.x) {
    const int64_t position = shape.position_per_sample ? token : token / shape.batch;
    for (int i = static_cast<int>(threadIdx.x); i < work; i += kRowThreads) {
      const int pair = i % heads.pairs;
      const int slot = i / heads.pairs % heads.slots;
      const int64_t index = token * shape.num_groups + i / heads.pairs / heads.slots;
      Float* whole = static_cast<Float*>(params.qkv) + (index * heads.slots + slot) * heads.dim;
      Float* part = part_of<Float>(params, index, slot);
      const Float* from = params.backward ? part : whole;
      Float* to = params.backward ? whole : part;
      const bool turns = slot <= shape.q_per_kv && pair < heads.rotated;
      const int first = heads.first(pair, turns);
      const int second = heads.second(pair, turns);
      Pack<Float, kPack> a = load_pack<kPack>(from, first);
      Pack<Float, kPack> b = load_pack<kPack>(from, second);
      if (turns) {
        turn(a, b, first, params.cos + position * heads.half, params.sin + position * heads.half,
             params.backward ? -1.0F : 1.0F);
      }
      store_pack(to, first, a);
      store_pack(to, second, b);
    }
  }
}

// ---- with a norm of each head -------------------------------------------------------------------

// The sum over kLanes neighbouring lanes, the same in all of them.
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// A head of queries or keys, or a value, and what a lane has of it.
template <typename Float>
struct HeadOfLane {
  bool is_there;  // else the lane only takes part in sums
  bool is_normed;
  bool is_query;
  bool turns;
  int first;  // packs
  int second;
  int64_t token;
  int64_t scale;  // index of its factor
  Float* part;
  const Float* weight;

  __device__ HeadOfLane(const NormRotateParams& params,
                        const Heads& heads,
                        int64_t head,
                        int lane) {
    const layers::HeadShape& shape = params.heads.shape;
    const int64_t index = head / heads.slots;
    const int slot = static_cast<int>(head % heads.slots);
    is_there = head < shape.num_tokens * shape.num_groups * heads.slots && lane < heads.pairs;
    is_normed = slot <= shape.q_per_kv;
    is_query = slot < shape.q_per_kv;
    turns = is_normed && lane < heads.rotated;
    first = heads.first(lane, turns);
    second = heads.second(lane, turns);
    token = index / shape.num_groups;
    scale = index * (heads.slots - 1) + slot;
    part = part_of<Float>(params.heads, index, slot);
    weight = static_cast<const Float*>(is_query ? params.q_weight : params.k_weight);
  }
};

// kLanes threads share a head, so a lane has at most one pair of packs.
template <typename Float, int kPack, int kLanes>
__global__ void __launch_bounds__(kRowThreads) norm_rotate_kernel(NormRotateParams params) {
  const layers::HeadShape& shape = params.heads.shape;
  const Heads heads(shape, kPack);
  const Team team = team_of(kLanes);
  const int64_t count = shape.num_tokens * shape.num_groups * heads.slots;
  // All lanes of a warp take the same rounds, because they sum together.
  for (int64_t head = team.group; head - threadIdx.x % kWarp / kLanes < count;
       head += team.num_groups) {
    const HeadOfLane<Float> mine(params, heads, head, team.lane);
    const Float* from = static_cast<const Float*>(params.heads.qkv) + head * heads.dim;
    Pack<Float, kPack> a = {};
    Pack<Float, kPack> b = {};
    if (mine.is_there) {
      a = load_pack<kPack>(from, mine.first);
      b = load_pack<kPack>(from, mine.second);
    }
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      sum += widen(a.values[i]) * widen(a.values[i]) + widen(b.values[i]) * widen(b.values[i]);
    }
    sum = lanes_sum<kLanes>(sum);
    if (!mine.is_there) {
      continue;
    }
    if (mine.is_normed) {
      const float scale = 1.0F / sqrtf(sum / static_cast<float>(heads.dim) + params.eps);
      if (team.lane == 0) {
        params.scale[mine.scale] = scale;
      }
      const Pack<Float, kPack> weight_a = load_pack<kPack>(mine.weight, mine.first);
      const Pack<Float, kPack> weight_b = load_pack<kPack>(mine.weight, mine.second);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        narrow(widen(a.values[i]) * scale * widen(weight_a.values[i]), a.values[i]);
        narrow(widen(b.values[i]) * scale * widen(weight_b.values[i]), b.values[i]);
      }
    }
    if (mine.turns) {
      const int64_t at =
          (shape.position_per_sample ? mine.token : mine.token / shape.batch) * heads.half;
      turn(a, b, mine.first, params.heads.cos + at, params.heads.sin + at, 1.0F);
    }
    store_pack(mine.part, mine.first, a);
    store_pack(mine.part, mine.second, b);
  }
}

// What a lane computes of the gradient of a norm: from the gradient of the result to that of x.
template <typename Float, int kPack>
struct NormGrad {
  Pack<Float, kPack> grad = {};
  Pack<Float, kPack> x = {};
  Pack<Float, kPack> weight = {};

  __device__ __forceinline__ void load(const Float* x_row, const Float* weights, int pack) {
    x = load_pack<kPack>(x_row, pack);
    weight = load_pack<kPack>(weights, pack);
  }
  // Adds to the gradient of the weight and returns the lane's part of the radial sum.
  __device__ __forceinline__ float add(float scale,
                                       bool is_query,
                                       float* q_sums,
                                       float* k_sums) const {
    float radial = 0.0F;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float along = widen(grad.values[i]) * (widen(x.values[i]) * scale);
      q_sums[i] += is_query ? along : 0.0F;
      k_sums[i] += is_query ? 0.0F : along;
      radial += along * widen(weight.values[i]);
    }
    return radial;
  }
  __device__ __forceinline__ Pack<Float, kPack> of_x(float scale, float radial) const {
    Pack<Float, kPack> result;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float unit = widen(x.values[i]) * scale;
      narrow((widen(grad.values[i]) * widen(weight.values[i]) - unit * radial) * scale,
             result.values[i]);
    }
    return result;
  }
};

template <typename Float, int kPack, int kLanes>
__global__ void __launch_bounds__(kRowThreads)
    norm_rotate_backward_kernel(NormRotateParams params) {
  const layers::HeadShape& shape = params.heads.shape;
  const Heads heads(shape, kPack);
  const Team team = team_of(kLanes);
  const int64_t count = shape.num_tokens * shape.num_groups * heads.slots;
  float q_sums[2 * kPack] = {};
  float k_sums[2 * kPack] = {};
  for (int64_t head = team.group; head - threadIdx.x % kWarp / kLanes < count;
       head += team.num_groups) {
    const HeadOfLane<Float> mine(params, heads, head, team.lane);
    NormGrad<Float, kPack> a;
    NormGrad<Float, kPack> b;
    float scale = 0.0F;
    if (mine.is_there) {
      a.grad = load_pack<kPack>(mine.part, mine.first);
      b.grad = load_pack<kPack>(mine.part, mine.second);
      if (mine.is_normed) {
        const Float* x = static_cast<const Float*>(params.x) + head * heads.dim;
        a.load(x, mine.weight, mine.first);
        b.load(x, mine.weight, mine.second);
        scale = params.scale[mine.scale];
      }
      if (mine.turns) {
        const int64_t at =
            (shape.position_per_sample ? mine.token : mine.token / shape.batch) * heads.half;
        turn(a.grad, b.grad, mine.first, params.heads.cos + at, params.heads.sin + at, -1.0F);
      }
    }
    float radial = 0.0F;
    if (mine.is_normed) {
      radial = a.add(scale, mine.is_query, q_sums, k_sums) +
               b.add(scale, mine.is_query, q_sums + kPack, k_sums + kPack);
    }
    radial = lanes_sum<kLanes>(radial) / static_cast<float>(heads.dim);
    if (mine.is_there && params.heads.qkv != nullptr) {
      Float* to = static_cast<Float*>(params.heads.qkv) + head * heads.dim;
      store_pack(to, mine.first, mine.is_normed ? a.of_x(scale, radial) : a.grad);
      store_pack(to, mine.second, mine.is_normed ? b.of_x(scale, radial) : b.grad);
    }
  }
  if (params.partial_sums == nullptr) {
    return;
  }
  const bool turns = team.lane < heads.rotated;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  float* row = params.partial_sums + (int64_t{blockIdx.x} * kWarpsOfBlock + warp) * 2 * heads.dim;
  const bool writes = threadIdx.x % kWarp < kLanes && team.lane < heads.pairs;
#pragma unroll
  for (int i = 0; i < 2 * kPack; ++i) {
    float q_sum = q_sums[i];
    float k_sum = k_sums[i];
#pragma unroll
    for (int distance = kLanes; distance < kWarp; distance *= 2) {
      q_sum += __shfl_xor_sync(kAllLanes, q_sum, distance);
      k_sum += __shfl_xor_sync(kAllLanes, k_sum, distance);
    }
    const int pack = i < kPack ? heads.first(team.lane, turns) : heads.second(team.lane, turns);
    if (writes) {
      row[pack * kPack + i % kPack] = q_sum;
      row[heads.dim + pack * kPack + i % kPack] = k_sum;
    }
  }
}

// ---- launchers ----------------------------------------------------------------------------------

void require_heads(const layers::HeadShape& shape) {
  MC_REQUIRE(shape.num_tokens >= 0 && shape.batch >= 1 && shape.num_groups >= 1 &&
                 shape.q_per_kv >= 1 && shape.head_dim >= 2 && shape.head_dim % 2 == 0 &&
                 shape.num_rotated >= 0 && shape.num_rotated % 2 == 0 &&
                 shape.num_rotated <= shape.head_dim &&
                 shape.num_groups * (shape.q_per_kv + 2) * shape.head_dim < int64_t{1} << 30,
             "heads of {} elements, {} of them rotated, in {} groups of {} queries; the kernel "
             "takes even numbers, and fewer than 2^30 elements of a token",
             shape.head_dim, shape.num_rotated, shape.num_groups, shape.q_per_kv);
}

bool is_packed_rotation(const RotateParams& params) {
  const layers::HeadShape& shape = params.shape;
  const int64_t pack = kPackBytes / bytes_of(params.type);
  return is_packed(params.qkv) && is_packed(params.q) && is_packed(params.k) &&
         is_packed(params.v) && is_packed(params.cos) && is_packed(params.sin) &&
         shape.head_dim % (2 * pack) == 0 && shape.num_rotated % (2 * pack) == 0;
}

int64_t num_heads(const layers::HeadShape& shape) {
  return shape.num_tokens * shape.num_groups * (shape.q_per_kv + 2);
}

void require_norms(const NormRotateParams& params) {
  require_heads(params.heads.shape);
  const int64_t bytes = params.heads.shape.head_dim * bytes_of(params.heads.type);
  MC_REQUIRE(is_packed_rotation(params.heads) && bytes <= kMaxNormedHeadBytes,
             "heads of {} bytes, {} elements rotated; a norm takes both as multiples of 32 bytes, "
             "heads of up to {} bytes, and addresses that are multiples of {} bytes",
             bytes, params.heads.shape.num_rotated, kMaxNormedHeadBytes, kPackBytes);
  MC_REQUIRE(is_packed(params.x) && is_packed(params.q_weight) && is_packed(params.k_weight),
             "x and the weights must have addresses that are multiples of {} bytes", kPackBytes);
}

// Calls body.operator()<Float, kPack, kLanes>() for as many lanes as a head has pairs of packs.
template <typename Float, int kPack, int kLanes = 4, typename Body>
void with_lanes(int64_t head_dim, const Body& body) {
  if constexpr (kLanes < kWarp) {
    if (head_dim > int64_t{2} * kPack * kLanes) {
      return with_lanes<Float, kPack, 2 * kLanes>(head_dim, body);
    }
  }
  body.template operator()<Float, kPack, kLanes>();
}

template <typename Body>
void with_heads(const RotateParams& heads, const Body& body) {
  switch (heads.type) {
    case FloatType::kFloat32:
      return with_lanes<float, 4>(heads.shape.head_dim, body);
    case FloatType::kBfloat16:
      return with_lanes<Bfloat16, 8>(heads.shape.head_dim, body);
    case FloatType::kFloat16:
      return with_lanes<Float16, 8>(heads.shape.head_dim, body);
  }
}

int64_t blocks_of_sums(int64_t count) {
  return std::clamp(divided_up(count, kRowThreads / kWarp), int64_t{1}, kSumBlocksOfHeads);
}

}  // namespace

void split_and_rotate(const RotateParams& params, cudaStream_t stream) {
  require_heads(params.shape);
  if (params.shape.num_tokens == 0) {
    return;
  }
  const int64_t pack = kPackBytes / bytes_of(params.type);
  with_float_type(params.type, is_packed_rotation(params), pack, [&]<typename Float, int kPack>() {
    launch("split_and_rotate", rotate_kernel<Float, kPack>,
           {.blocks = params.shape.num_tokens, .threads = kRowThreads}, stream, params);
  });
}

int64_t norm_rotate_partial_rows(int64_t num_heads) {
  return blocks_of_sums(num_heads) * kWarpsOfBlock;
}

void norm_and_rotate(const NormRotateParams& params, cudaStream_t stream) {
  require_norms(params);
  const int64_t count = num_heads(params.heads.shape);
  const bool backward = params.heads.backward;
  const bool sums = backward && params.partial_sums != nullptr;
  if (count == 0 && !sums) {
    return;
  }
  with_heads(params.heads, [&]<typename Float, int kPack, int kLanes>() {
    if (!backward) {
      launch("norm_and_rotate", norm_rotate_kernel<Float, kPack, kLanes>,
             {.blocks = divided_up(count, kRowThreads / kLanes), .threads = kRowThreads}, stream,
             params);
      return;
    }
    launch("norm_and_rotate", norm_rotate_backward_kernel<Float, kPack, kLanes>,
           {.blocks = blocks_of_sums(count), .threads = kRowThreads}, stream, params);
    if (sums) {
      const int64_t dim = params.heads.shape.head_dim;
      launch_column_sums<Float>("norm_and_rotate", params.partial_sums,
                                norm_rotate_partial_rows(count), 2 * dim, dim,
                                static_cast<Float*>(params.grad_q_weight),
                                static_cast<Float*>(params.grad_k_weight), stream);
    }
  });
}

}  // namespace megacore::cuda
