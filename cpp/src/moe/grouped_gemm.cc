#include "megacore/moe/grouped_gemm.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "gemm_block.h"
#include "megacore/base/check.h"
#include "megacore/base/intmath.h"
#include "megacore/base/parallel_for.h"
#include "megacore/moe/gemm_skinny.h"

namespace megacore::moe {
namespace {

using base::align_up;
using base::ceil_div;

// A thread is worth waking for this many multiply-adds, some 20 us of work.
constexpr int64_t kMacsPerThread = int64_t{1} << 21;

// Rows that the work on an expert's weight is worth, beside the rows it is multiplied with.
constexpr int64_t kWeightCostRows = 8;

// Groups up to this size have their rows as the columns of a tile, y^T = w x^T: then the weight is
// copied, and the result is transposed. In larger groups it is cheaper to transpose the weight.
constexpr int64_t kFewRows = 48;

// Parts with fewer rows than these would spend much of their time on packing the right side for
// themselves, or on waking threads.
constexpr int64_t kLeastOwnRows = 96;
constexpr int64_t kLeastSharedRows = 30;

enum class Kind : int8_t { kForward, kInputGrad, kWeightGrad };

struct Problem {
  Kind kind;
  Source a;  // x or grad_y
  Source b;  // w, or x for a weight gradient
  Target c;
  GroupedShape shape;
  bool accumulate = false;
};

struct Task {
  int64_t first_row;
  int64_t num_rows;
  int64_t expert;
  int64_t shared = kAlone;  // place of the expert's packed right side, or that a task packs its own
  Part part;

  static constexpr int64_t kAlone = -1;
};

// Parts of one result share a packed right side if they have fewer rows than this each: packing
// takes some 1% of the time of 256 rows. It must not be larger than this many numbers.
constexpr int64_t kSharedRows = 512;
constexpr int64_t kMostShared = int64_t{1} << 22;

int64_t bytes_of(NumberFormat format) { return pack_kernels(format).element_bytes; }

Side side(Source source, int64_t offset, int64_t stride, bool by_depth, int64_t count) {
  const PackKernels& pack = pack_kernels(source.format);
  return {.data = static_cast<const char*>(source.data) + offset * pack.element_bytes,
          .stride = stride,
          .by_depth = by_depth,
          .count = count,
          .pack = &pack};
}

Result result(Target target, int64_t offset, int64_t stride, bool turned, bool accumulate) {
  const PackKernels& pack = pack_kernels(target.format);
  return {.data = static_cast<char*>(target.data) + offset * pack.element_bytes,
          .stride = stride,
          .turned = turned,
          .accumulate = accumulate,
          .format = target.format,
          .pack = &pack};
}

// A product of one expert: (rows x depth) times (depth x columns).
struct Product {
  Side left;
  Side right;
  Result result;
  int64_t rows;
  int64_t columns;
  int64_t depth;
};

Product product_of(const Problem& p, int64_t expert, int64_t first_row, int64_t num_rows) {
  const int64_t n = p.shape.out_features, k = p.shape.in_features;
  const int64_t weight = expert * n * k;
  if (p.kind == Kind::kWeightGrad) {
    return {.left = side(p.a, first_row * n, n, true, n),
            .right = side(p.b, first_row * k, k, true, k),
            .result = result(p.c, weight, k, false, p.accumulate),
            .rows = n,
            .columns = k,
            .depth = num_rows};
  }
  if (p.kind == Kind::kInputGrad) {
    return {.left = side(p.a, first_row * n, n, false, num_rows),
            .right = side(p.b, weight, k, true, k),
            .result = result(p.c, first_row * k, k, false, false),
            .rows = num_rows,
            .columns = k,
            .depth = n};
  }
  const bool is_turned = num_rows <= kFewRows;
  const Side x = side(p.a, first_row * k, k, false, num_rows);
  const Side w = side(p.b, weight, k, false, n);
  return {.left = is_turned ? w : x,
          .right = is_turned ? x : w,
          .result = result(p.c, first_row * n, n, is_turned, false),
          .rows = is_turned ? n : num_rows,
          .columns = is_turned ? num_rows : n,
          .depth = k};
}

// Whether rows are multiplied by the kernels for a handful of them.
bool is_skinny(const Problem& p, int64_t num_rows) {
  return p.kind != Kind::kWeightGrad && num_rows <= kSkinnyRows &&
         p.a.format == NumberFormat::kFloat32 && p.b.format == NumberFormat::kFloat32 &&
         p.c.format == NumberFormat::kFloat32;
}

// The features of the result from `begin` to `end`.
void run_skinny(const Problem& p, const Task& task, int64_t begin, int64_t end) {
  const int64_t n = p.shape.out_features, k = p.shape.in_features;
  const auto* rows = static_cast<const float*>(p.a.data);
  const auto* weight = static_cast<const float*>(p.b.data) + task.expert * n * k;
  auto* to = static_cast<float*>(p.c.data);
  if (p.kind == Kind::kForward) {
    skinny_kernels().forward(rows + task.first_row * k, weight + begin * k,
                             to + task.first_row * n + begin, task.num_rows, end - begin, k, n);
  } else {
    skinny_kernels().input_grad(rows + task.first_row * n, weight + begin,
                                to + task.first_row * k + begin, task.num_rows, n, end - begin, n,
                                k);
  }
}

void run_task(const Problem& p, const Task& task, const float* shared, Scratch& scratch) {
  const Part& part = task.part;
  if (is_skinny(p, task.num_rows)) {
    const bool is_turned = p.kind == Kind::kForward;
    run_skinny(p, task, is_turned ? part.row_begin : part.column_begin,
               is_turned ? part.row_end : part.column_end);
    return;
  }
  const Product product = product_of(p, task.expert, task.first_row, task.num_rows);
  multiply_part(product.left, product.right, product.result, part, product.depth,
                task.shared == Task::kAlone ? nullptr : shared + task.shared, scratch);
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

// Steps by which a result is cut into at least `wanted` parts of similar size, where it is large
// enough. Cutting columns is free, down to those that are packed at a time; each further set of
// rows packs these columns again, unless they share them.
struct Steps {
  int64_t rows;
  int64_t columns;
};

Steps steps_for(int64_t rows, int64_t columns, int64_t wanted, bool may_share) {
  const TileKernels& kernels = tile_kernels();
  if (wanted <= 1) {
    return {.rows = rows, .columns = columns};
  }
  const int64_t blocks = ceil_div(columns, kRightColumns);
  if (blocks >= wanted) {
    return {.rows = rows, .columns = align_up(ceil_div(columns, wanted), kernels.columns)};
  }
  const int64_t least = may_share ? kLeastSharedRows : kLeastOwnRows;
  const int64_t most = std::max<int64_t>(1, rows / least);
  const int64_t row_parts = std::min(most, ceil_div(wanted, blocks));
  const int64_t column_parts = std::max(blocks, ceil_div(wanted, row_parts));
  return {.rows = align_up(ceil_div(rows, row_parts), kernels.max_rows),
          .columns = std::max(kernels.columns * 2,
                              align_up(ceil_div(columns, column_parts), kernels.columns))};
}

struct Plan {
  std::vector<Task> tasks;
  std::vector<Task> packs;  // one task of each expert whose right side is shared
  int64_t shared_size = 0;
};

// Cuts the results of all experts so that there are a few tasks per thread of similar cost.
Plan make_plan(const Problem& p, const int64_t* m_splits, int64_t total_rows, int num_threads) {
  constexpr int64_t kTasksPerThread = 4;
  const int64_t total_cost = total_rows + p.shape.num_experts * kWeightCostRows;
  Plan plan;
  int64_t first_row = 0;
  for (int64_t e = 0; e < p.shape.num_experts; ++e) {
    const int64_t num_rows = m_splits[e];
    const Product product = product_of(p, e, first_row, num_rows);
    const int64_t rows = product.rows, columns = product.columns;
    if (num_rows > 0 && rows > 0 && columns > 0) {
      const int64_t cost = num_rows + kWeightCostRows;
      const int64_t wanted =
          num_threads == 1 ? 1 : ceil_div(cost * kTasksPerThread * num_threads, total_cost);
      Task task{.first_row = first_row, .num_rows = num_rows, .expert = e, .part = {}};
      const int64_t size = shared_size(columns, product.depth);
      const bool may_share = plan.shared_size + size <= kMostShared;
      const Steps step = steps_for(rows, columns, wanted, may_share);
      if (may_share && step.rows < std::min(rows, kSharedRows)) {
        task.shared = plan.shared_size;
        plan.shared_size += size;
        plan.packs.push_back(task);
      }
      for (int64_t column = 0; column < columns; column += step.columns) {
        for (int64_t row = 0; row < rows; row += step.rows) {
          task.part = {.row_begin = row,
                       .row_end = std::min(rows, row + step.rows),
                       .column_begin = column,
                       .column_end = std::min(columns, column + step.columns)};
          plan.tasks.push_back(task);
        }
      }
    }
    first_row += num_rows;
  }
  return plan;
}

// Packs the right sides that several tasks share, each block by the thread that is free.
void pack_shared(const Problem& p, const Plan& plan, float* shared, int num_threads) {
  struct Piece {
    Side right;
    RightBlock block;
    float* packed;
  };
  std::vector<Piece> pieces;
  for (const Task& task : plan.packs) {
    const Product product = product_of(p, task.expert, task.first_row, task.num_rows);
    for (const Task& of_all : plan.tasks) {
      // The columns are cut as those of the tasks, of which the first rows stand for all.
      if (of_all.expert == task.expert && of_all.part.row_begin == 0) {
        const Part& part = of_all.part;
        for (const RightBlock& block :
             right_blocks(part.column_begin, part.column_end, product.depth)) {
          pieces.push_back({.right = product.right,
                            .block = block,
                            .packed = shared + task.shared + block.shared_place});
        }
      }
    }
  }
  base::parallel_for(static_cast<int64_t>(pieces.size()), 1, num_threads,
                     [&](int64_t begin, int64_t end) {
                       for (int64_t i = begin; i < end; ++i) {
                         const Piece& piece = pieces[static_cast<size_t>(i)];
                         pack_right(piece.right, piece.block, piece.packed);
                       }
                     });
}

int64_t most_sums(const Problem& p, const std::vector<Task>& tasks) {
  int64_t most = 0;
  for (const Task& task : tasks) {
    const Product product = product_of(p, task.expert, task.first_row, task.num_rows);
    most = std::max(most, sums_size(product.result, task.part, product.depth));
  }
  return most;
}

void run_plan(const Problem& problem, const Plan& plan, int num_threads) {
  struct Work {
    const Problem& problem;
    const std::vector<Task>& tasks;
    const float* shared;
    // Not initialized: every task writes what it reads.
    std::unique_ptr<Scratch[]> scratches;
    std::atomic<size_t> next_task = 0;
    std::atomic<size_t> next_scratch = 0;
  };
  if (plan.tasks.empty()) {
    return;
  }
  const auto shared =
      std::make_unique_for_overwrite<float[]>(static_cast<size_t>(plan.shared_size));
  pack_shared(problem, plan, shared.get(), num_threads);
  const auto count = static_cast<size_t>(num_threads);
  Work work{.problem = problem,
            .tasks = plan.tasks,
            .shared = shared.get(),
            .scratches = std::make_unique_for_overwrite<Scratch[]>(count)};
  const auto sums = static_cast<size_t>(most_sums(problem, plan.tasks));
  for (size_t i = 0; i < count && sums > 0; ++i) {
    work.scratches[i].sums = std::make_unique_for_overwrite<float[]>(sums);
  }
  const auto take = [](void* data) {
    auto& w = *static_cast<Work*>(data);
    Scratch& scratch = w.scratches[w.next_scratch.fetch_add(1)];
    for (size_t i = w.next_task.fetch_add(1); i < w.tasks.size(); i = w.next_task.fetch_add(1)) {
      run_task(w.problem, w.tasks[i], w.shared, scratch);
    }
  };
  base::run_team(num_threads, take, &work);
}

// Sets rows of a result to zero.
void clear_rows(Target target, int64_t begin, int64_t end, int64_t width) {
  const int64_t row_bytes = width * bytes_of(target.format);
  if (end > begin) {
    std::memset(static_cast<char*>(target.data) + begin * row_bytes, 0,
                static_cast<size_t>((end - begin) * row_bytes));
  }
}

void multiply_rows(const Problem& problem,
                   const int64_t* m_splits,
                   bool clear_padding,
                   int num_threads) {
  const GroupedShape& shape = problem.shape;
  const int64_t total = check(m_splits, shape, num_threads);
  const bool is_forward = problem.kind == Kind::kForward;
  const int64_t width = is_forward ? shape.out_features : shape.in_features;
  // Without features to sum over no block exists that would write the result.
  const bool has_depth = (is_forward ? shape.in_features : shape.out_features) > 0;
  clear_rows(problem.c, has_depth ? total : 0, clear_padding ? shape.num_rows : total, width);
  if (has_depth) {
    const int threads = useful_threads(total, shape, num_threads);
    run_plan(problem, make_plan(problem, m_splits, total, threads), threads);
  }
}

}  // namespace

void grouped_gemm(Source x,
                  Source w,
                  const int64_t* m_splits,
                  Target y,
                  const GroupedShape& shape,
                  bool clear_padding,
                  int num_threads) {
  multiply_rows({.kind = Kind::kForward, .a = x, .b = w, .c = y, .shape = shape}, m_splits,
                clear_padding, num_threads);
}

void grouped_gemm_input_grad(Source grad_y,
                             Source w,
                             const int64_t* m_splits,
                             Target grad_x,
                             const GroupedShape& shape,
                             bool clear_padding,
                             int num_threads) {
  multiply_rows({.kind = Kind::kInputGrad, .a = grad_y, .b = w, .c = grad_x, .shape = shape},
                m_splits, clear_padding, num_threads);
}

void grouped_gemm_weight_grad(Source grad_y,
                              Source x,
                              const int64_t* m_splits,
                              Target grad_w,
                              const GroupedShape& shape,
                              bool accumulate,
                              int num_threads) {
  const int64_t total = check(m_splits, shape, num_threads);
  MC_REQUIRE(!accumulate || grad_w.format == NumberFormat::kFloat32,
             "a weight gradient must be float32 to be added to");
  for (int64_t e = 0; e < shape.num_experts && !accumulate; ++e) {
    if (m_splits[e] == 0) {
      clear_rows(grad_w, e * shape.out_features, (e + 1) * shape.out_features, shape.in_features);
    }
  }
  const int threads = useful_threads(total, shape, num_threads);
  const Problem problem{.kind = Kind::kWeightGrad,
                        .a = grad_y,
                        .b = x,
                        .c = grad_w,
                        .shape = shape,
                        .accumulate = accumulate};
  run_plan(problem, make_plan(problem, m_splits, total, threads), threads);
}

}  // namespace megacore::moe
