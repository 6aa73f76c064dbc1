#include "megacore/moe/grouped_gemm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "gemm_tile.h"
#include "megacore/base/check.h"
#include "megacore/base/intmath.h"
#include "megacore/base/parallel_for.h"
#include "megacore/moe/gemm_skinny.h"

namespace megacore::moe {
namespace {

using base::ceil_div;

// Columns of the right side that are packed at a time: with kTileDepth rows they fill half of a
// 1 MiB second-level cache.
constexpr int64_t kRightColumns = 256;

// A thread is worth waking for this many multiply-adds, some 20 us of work.
constexpr int64_t kMacsPerThread = int64_t{1} << 21;

// Rows that the work on an expert's weight is worth, beside the rows it is multiplied with.
constexpr int64_t kWeightCostRows = 8;

// A part of one expert's result: [begin, end) of its columns (or of its rows, for a weight).
struct Task {
  int64_t first_row;
  int64_t num_rows;
  int64_t expert;
  int64_t begin;
  int64_t end;
};

// Buffers of one thread. Aligned to cache lines, so that no vector of the right side crosses two.
struct alignas(64) Scratch {
  std::array<float, kMaxTileRows * kLeftStride> left;
  alignas(64) std::array<float, kTileDepth * kRightColumns> right;
  alignas(64) std::array<float, kMaxTileRows * kMaxTileColumns> tile;
};

// A panel is a set of neighbouring columns of the right side, packed as (depth, width).
struct Panel {
  int64_t first;  // column
  int64_t used;   // columns that exist; the rest of the width is zero
  int64_t width;  // that of a whole tile or of half of one
  const TileFunction* functions;
};

Panel panel_at(const TileKernels& kernels, int64_t first, int64_t end) {
  const int64_t used = std::min(kernels.columns, end - first);
  const bool is_half = used * 2 <= kernels.columns;
  return {.first = first,
          .used = used,
          .width = is_half ? kernels.columns / 2 : kernels.columns,
          .functions = is_half ? kernels.half : kernels.whole};
}

// packed[d][j] = source[d * stride + j], zero for j in [used, width).
void pack_rows(
    const float* source, int64_t stride, int64_t depth, const Panel& panel, float* packed) {
  for (int64_t d = 0; d < depth; ++d) {
    float* row = packed + d * panel.width;
    std::copy_n(source + d * stride, panel.used, row);
    std::fill(row + panel.used, row + panel.width, 0.0F);
  }
}

// packed[d][j] = source[j * stride + d], zero for j in [used, width).
void pack_columns(
    const float* source, int64_t stride, int64_t depth, const Panel& panel, float* packed) {
  // In squares that fit a few cache lines on both sides.
  constexpr int64_t kBlock = 16;
  for (int64_t d = 0; d < depth; d += kBlock) {
    const int64_t d_end = std::min(depth, d + kBlock);
    for (int64_t j = 0; j < panel.used; ++j) {
      for (int64_t at = d; at < d_end; ++at) {
        packed[at * panel.width + j] = source[j * stride + at];
      }
    }
    for (int64_t at = d; at < d_end; ++at) {
      std::fill(packed + at * panel.width + panel.used, packed + (at + 1) * panel.width, 0.0F);
    }
  }
}

// left[i][d] = source[i * stride + d].
void pack_left(const float* source, int64_t stride, int64_t rows, int64_t depth, float* left) {
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(source + i * stride, depth, left + i * kLeftStride);
  }
}

// left[i][d] = source[d * stride + i].
void pack_left_transposed(
    const float* source, int64_t stride, int64_t rows, int64_t depth, float* left) {
  for (int64_t d = 0; d < depth; ++d) {
    for (int64_t i = 0; i < rows; ++i) {
      left[i * kLeftStride + d] = source[d * stride + i];
    }
  }
}

// Multiplies packed sides into rows of c, which start at column `panel.first`.
void multiply_into(const Scratch& scratch,
                   const float* right,
                   const Panel& panel,
                   int64_t rows,
                   int64_t depth,
                   float* c,
                   int64_t c_stride,
                   bool accumulate,
                   float* tile) {
  const TileFunction function = panel.functions[rows - 1];
  if (panel.used == panel.width) {
    function(scratch.left.data(), right, depth, c, c_stride, accumulate);
    return;
  }
  function(scratch.left.data(), right, depth, tile, panel.width, false);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < panel.used; ++j) {
      float& target = c[i * c_stride + j];
      target = accumulate ? target + tile[i * panel.width + j] : tile[i * panel.width + j];
    }
  }
}

// Tokens are the columns of the tile: y^T = w x^T. So weights need no transposing.
void forward_task(
    const Task& task, const float* x, const float* w, float* y, const GroupedShape& s, Scratch& b) {
  const TileKernels& kernels = tile_kernels();
  const float* weight = w + task.expert * s.out_features * s.in_features;
  if (task.num_rows <= kSkinnyRows) {
    skinny_kernels().forward(x + task.first_row * s.in_features,
                             weight + task.begin * s.in_features,
                             y + task.first_row * s.out_features + task.begin, task.num_rows,
                             task.end - task.begin, s.in_features, s.out_features);
    return;
  }
  const int64_t last_row = task.first_row + task.num_rows;
  for (int64_t row = task.first_row; row < last_row; row += kRightColumns) {
    const int64_t row_end = std::min(last_row, row + kRightColumns);
    for (int64_t k = 0; k < s.in_features; k += kTileDepth) {
      const int64_t depth = std::min(kTileDepth, s.in_features - k);
      for (int64_t at = row; at < row_end; at += kernels.columns) {
        pack_columns(x + at * s.in_features + k, s.in_features, depth,
                     panel_at(kernels, at, row_end), b.right.data() + (at - row) * depth);
      }
      for (int64_t n = task.begin; n < task.end; n += kernels.max_rows) {
        const int64_t rows = std::min(kernels.max_rows, task.end - n);
        pack_left(weight + n * s.in_features + k, s.in_features, rows, depth, b.left.data());
        for (int64_t at = row; at < row_end; at += kernels.columns) {
          const Panel panel = panel_at(kernels, at, row_end);
          panel.functions[rows - 1](b.left.data(), b.right.data() + (at - row) * depth, depth,
                                    b.tile.data(), panel.width, false);
          for (int64_t j = 0; j < panel.used; ++j) {
            float* target = y + (at + j) * s.out_features + n;
            for (int64_t i = 0; i < rows; ++i) {
              const float sum = b.tile[static_cast<size_t>(i * panel.width + j)];
              target[i] = k == 0 ? sum : target[i] + sum;
            }
          }
        }
      }
    }
  }
}

void input_grad_task(const Task& task,
                     const float* grad_y,
                     const float* w,
                     float* grad_x,
                     const GroupedShape& s,
                     Scratch& b) {
  const TileKernels& kernels = tile_kernels();
  const float* weight = w + task.expert * s.out_features * s.in_features;
  if (task.num_rows <= kSkinnyRows) {
    skinny_kernels().input_grad(grad_y + task.first_row * s.out_features, weight + task.begin,
                                grad_x + task.first_row * s.in_features + task.begin, task.num_rows,
                                s.out_features, task.end - task.begin, s.out_features,
                                s.in_features);
    return;
  }
  const int64_t last_row = task.first_row + task.num_rows;
  for (int64_t k = task.begin; k < task.end; k += kRightColumns) {
    const int64_t k_end = std::min(task.end, k + kRightColumns);
    for (int64_t n = 0; n < s.out_features; n += kTileDepth) {
      const int64_t depth = std::min(kTileDepth, s.out_features - n);
      for (int64_t at = k; at < k_end; at += kernels.columns) {
        pack_rows(weight + n * s.in_features + at, s.in_features, depth,
                  panel_at(kernels, at, k_end), b.right.data() + (at - k) * depth);
      }
      for (int64_t row = task.first_row; row < last_row; row += kernels.max_rows) {
        const int64_t rows = std::min(kernels.max_rows, last_row - row);
        pack_left(grad_y + row * s.out_features + n, s.out_features, rows, depth, b.left.data());
        for (int64_t at = k; at < k_end; at += kernels.columns) {
          multiply_into(b, b.right.data() + (at - k) * depth, panel_at(kernels, at, k_end), rows,
                        depth, grad_x + row * s.in_features + at, s.in_features, n > 0,
                        b.tile.data());
        }
      }
    }
  }
}

void weight_grad_task(const Task& task,
                      const float* grad_y,
                      const float* x,
                      float* grad_w,
                      const GroupedShape& s,
                      bool accumulate,
                      Scratch& b) {
  const TileKernels& kernels = tile_kernels();
  float* weight = grad_w + task.expert * s.out_features * s.in_features;
  for (int64_t k = 0; k < s.in_features; k += kRightColumns) {
    const int64_t k_end = std::min(s.in_features, k + kRightColumns);
    for (int64_t done = 0; done < task.num_rows; done += kTileDepth) {
      const int64_t depth = std::min(kTileDepth, task.num_rows - done);
      const int64_t row = task.first_row + done;
      for (int64_t at = k; at < k_end; at += kernels.columns) {
        pack_rows(x + row * s.in_features + at, s.in_features, depth, panel_at(kernels, at, k_end),
                  b.right.data() + (at - k) * depth);
      }
      for (int64_t n = task.begin; n < task.end; n += kernels.max_rows) {
        const int64_t rows = std::min(kernels.max_rows, task.end - n);
        pack_left_transposed(grad_y + row * s.out_features + n, s.out_features, rows, depth,
                             b.left.data());
        for (int64_t at = k; at < k_end; at += kernels.columns) {
          multiply_into(b, b.right.data() + (at - k) * depth, panel_at(kernels, at, k_end), rows,
                        depth, weight + n * s.in_features + at, s.in_features,
                        accumulate || done > 0, b.tile.data());
        }
      }
    }
  }
}

int64_t check(const int64_t* m_splits, const GroupedShape& s, int num_threads) {
  MC_REQUIRE(s.num_rows >= 0 && s.num_experts >= 0 && s.out_features >= 0 && s.in_features >= 0,
             "a size is negative");
  MC_REQUIRE(num_threads >= 1, "num_threads must be at least 1, got {}", num_threads);
  int64_t total = 0;
  for (int64_t e = 0; e < s.num_experts; ++e) {
    MC_REQUIRE(m_splits[e] >= 0 && m_splits[e] <= s.num_rows - total,
               "m_splits[{}] is {}; with {} rows, of which the experts before have {}, it must lie "
               "in [0, {}]",
               e, m_splits[e], s.num_rows, total, s.num_rows - total);
    total += m_splits[e];
  }
  return total;
}

int useful_threads(int64_t total_rows, const GroupedShape& s, int num_threads) {
  const int64_t macs = total_rows * s.out_features * s.in_features;
  return macs >= 2 * kMacsPerThread ? num_threads : 1;
}

// Cuts every expert's `width` columns so that there are a few tasks per thread of similar cost.
std::vector<Task> make_tasks(const int64_t* m_splits,
                             int64_t total_rows,
                             int64_t num_experts,
                             int64_t width,
                             int64_t granule,
                             int num_threads) {
  constexpr int64_t kTasksPerThread = 4;
  const int64_t total_cost = total_rows + num_experts * kWeightCostRows;
  std::vector<Task> tasks;
  int64_t first_row = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t rows = m_splits[e];
    if (rows > 0 && width > 0) {
      const int64_t cost = rows + kWeightCostRows;
      const int64_t wanted =
          num_threads == 1 ? 1 : ceil_div(cost * kTasksPerThread * num_threads, total_cost);
      const int64_t step = base::align_up(ceil_div(width, wanted), granule);
      for (int64_t begin = 0; begin < width; begin += step) {
        tasks.push_back({.first_row = first_row,
                         .num_rows = rows,
                         .expert = e,
                         .begin = begin,
                         .end = std::min(width, begin + step)});
      }
    }
    first_row += rows;
  }
  return tasks;
}

template <typename Run>
void run_tasks(const std::vector<Task>& tasks, int num_threads, const Run& run) {
  struct Work {
    const std::vector<Task>& tasks;
    const Run& run;
    // Not initialized: every task writes what it reads.
    std::unique_ptr<Scratch[]> scratches;
    std::atomic<size_t> next_task = 0;
    std::atomic<size_t> next_scratch = 0;
  };
  if (tasks.empty()) {
    return;
  }
  Work work{
      .tasks = tasks,
      .run = run,
      .scratches = std::make_unique_for_overwrite<Scratch[]>(static_cast<size_t>(num_threads))};
  const auto take = [](void* data) {
    auto& w = *static_cast<Work*>(data);
    Scratch& scratch = w.scratches[w.next_scratch.fetch_add(1)];
    for (size_t i = w.next_task.fetch_add(1); i < w.tasks.size(); i = w.next_task.fetch_add(1)) {
      w.run(w.tasks[i], scratch);
    }
  };
  base::run_team(num_threads, take, &work);
}

}  // namespace

void grouped_gemm(const float* x,
                  const float* w,
                  const int64_t* m_splits,
                  float* y,
                  const GroupedShape& shape,
                  bool clear_padding,
                  int num_threads) {
  const int64_t total = check(m_splits, shape, num_threads);
  const int threads = useful_threads(total, shape, num_threads);
  // Without input features no block of the sum exists that would write the result.
  const int64_t written = shape.in_features > 0 ? total : 0;
  const int64_t end = clear_padding ? shape.num_rows : total;
  std::fill(y + written * shape.out_features, y + end * shape.out_features, 0.0F);
  if (written == 0) {
    return;
  }
  const int64_t granule = tile_kernels().max_rows * 4;
  run_tasks(
      make_tasks(m_splits, total, shape.num_experts, shape.out_features, granule, threads), threads,
      [&](const Task& task, Scratch& scratch) { forward_task(task, x, w, y, shape, scratch); });
}

void grouped_gemm_input_grad(const float* grad_y,
                             const float* w,
                             const int64_t* m_splits,
                             float* grad_x,
                             const GroupedShape& shape,
                             bool clear_padding,
                             int num_threads) {
  const int64_t total = check(m_splits, shape, num_threads);
  const int threads = useful_threads(total, shape, num_threads);
  const int64_t written = shape.out_features > 0 ? total : 0;
  const int64_t end = clear_padding ? shape.num_rows : total;
  std::fill(grad_x + written * shape.in_features, grad_x + end * shape.in_features, 0.0F);
  if (written == 0) {
    return;
  }
  const int64_t granule = tile_kernels().columns * 2;
  run_tasks(make_tasks(m_splits, total, shape.num_experts, shape.in_features, granule, threads),
            threads, [&](const Task& task, Scratch& scratch) {
              input_grad_task(task, grad_y, w, grad_x, shape, scratch);
            });
}

void grouped_gemm_weight_grad(const float* grad_y,
                              const float* x,
                              const int64_t* m_splits,
                              float* grad_w,
                              const GroupedShape& shape,
                              bool accumulate,
                              int num_threads) {
  const int64_t total = check(m_splits, shape, num_threads);
  const int threads = useful_threads(total, shape, num_threads);
  const int64_t numel = shape.out_features * shape.in_features;
  for (int64_t e = 0; e < shape.num_experts && !accumulate; ++e) {
    if (m_splits[e] == 0) {
      std::fill_n(grad_w + e * numel, numel, 0.0F);
    }
  }
  const int64_t granule = tile_kernels().max_rows * 4;
  run_tasks(make_tasks(m_splits, total, shape.num_experts, shape.out_features, granule, threads),
            threads, [&](const Task& task, Scratch& scratch) {
              weight_grad_task(task, grad_y, x, grad_w, shape, accumulate, scratch);
            });
}

}  // namespace megacore::moe
