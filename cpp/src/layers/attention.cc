#include "megacore/layers/attention.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "attention_rows.h"
#include "megacore/base/intmath.h"
#include "megacore/base/parallel_for.h"
#include "moe/gemm_pack.h"
#include "moe/gemm_tile.h"

namespace megacore::layers {
namespace {

using moe::kLeftStride;
using moe::kMaxTileColumns;
using moe::kMaxTileRows;
using moe::PackKernels;
using moe::TileFunctions;
using moe::TileKernels;

// Strips of a tile's rows whose results are kept while blocks of keys go by.
constexpr int64_t kQueryStrips = 16;
// Queries of a block of the backward pass. Their scores with kGradKeys keys stay in the cache.
constexpr int64_t kGradQueries = 128;
constexpr int64_t kGradKeys = 64;
constexpr int64_t kMostGradKeys = kGradKeys + kMaxTileRows;
// Ranges of queries per thread, where there are fewer heads.
constexpr int64_t kTasksPerThread = 4;

// ---- matrices

// Memory that starts at a line of the cache, so that no vector of a panel crosses two.
class Floats {
 public:
  explicit Floats(int64_t size)
      : data_(static_cast<float*>(
            ::operator new[](static_cast<size_t>(size) * sizeof(float), kAlignment))) {}

  float* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(float* data) const { ::operator delete[](data, kAlignment); }
  };
  std::unique_ptr<float[], Delete> data_;
};

int64_t padded(int64_t dim) { return base::align_up(dim, kMaxTileColumns); }

// The tokens of one head.
struct Head {
  const char* data;
  int64_t stride;  // elements between tokens
  const PackKernels* pack;

  const char* at(int64_t token) const { return data + token * stride * pack->element_bytes; }
};

Head head_of(const HeadsSource& source, int64_t batch, int64_t head) {
  const PackKernels& pack = moe::pack_kernels(source.elements.format);
  const int64_t first = batch * source.strides.batch + head * source.strides.head;
  return {static_cast<const char*>(source.elements.data) + first * pack.element_bytes,
          source.strides.token, &pack};
}

// Rounds `count` tokens with rows of padded(dim) sums into a head.
void write_tokens(const HeadsTarget& target,
                  int64_t batch,
                  int64_t head,
                  int64_t token,
                  const float* sums,
                  int64_t count,
                  int64_t dim) {
  const PackKernels& pack = moe::pack_kernels(target.elements.format);
  const HeadStrides& strides = target.strides;
  const int64_t first = batch * strides.batch + head * strides.head + token * strides.token;
  pack.round_rows(sums, padded(dim), count, dim,
                  static_cast<char*>(target.elements.data) + first * pack.element_bytes,
                  strides.token);
}

// The right side of products: columns in panels of a tile's width, each (depth, width).
class Panels {
 public:
  Panels(int64_t columns, int64_t depth)
      : kernels_(moe::tile_kernels()),
        columns_(columns),
        depth_(depth),
        data_(base::align_up(columns, kernels_.columns) * depth) {}

  // The columns are tokens, of `depth` elements; all of them fit the memory.
  void pack_tokens(const Head& head, int64_t token, int64_t count) {
    columns_ = count;
    for (int64_t p = 0; p < count_for(count); ++p) {
      const int64_t first = p * kernels_.columns;
      head.pack->right_by_columns(head.at(token + first), head.stride, used(p), width(p), depth_,
                                  panel(p));
    }
  }
  // The depth is that of tokens, the columns are their elements.
  void pack_elements(const Head& head, int64_t token, int64_t count) {
    depth_ = count;
    for (int64_t p = 0; p < count_for(columns_); ++p) {
      const int64_t first = p * kernels_.columns * head.pack->element_bytes;
      head.pack->right_by_depth(head.at(token) + first, head.stride, used(p), width(p), count,
                                panel(p));
    }
  }

  // Panels that contain the first `columns` columns.
  int64_t count_for(int64_t columns) const { return base::ceil_div(columns, kernels_.columns); }
  int64_t num_panels() const { return count_for(columns_); }

  // c[i][j] (+)= sum over d < depth of left(i, d) right(from + d, j), for the columns of panels
  // [first, end); c starts at the column of the first one.
  void multiply(const TileFunctions& functions,
                int64_t rows,
                const float* left,
                int64_t from,
                int64_t depth,
                int64_t first,
                int64_t end,
                float* c,
                int64_t c_stride,
                bool accumulate) const {
    for (int64_t p = first; p < end; ++p) {
      const int64_t columns = width(p);
      const auto& of_width = columns == kernels_.columns ? functions.whole : functions.half;
      of_width[rows - 1](left, panel(p) + from * columns, depth, c + (p - first) * kernels_.columns,
                         c_stride, accumulate);
    }
  }

 private:
  int64_t used(int64_t p) const {
    return std::min(kernels_.columns, columns_ - p * kernels_.columns);
  }
  int64_t width(int64_t p) const { return kernels_.panel_width(used(p)); }
  float* panel(int64_t p) const { return data_.get() + p * kernels_.columns * depth_; }

  const TileKernels& kernels_;
  int64_t columns_;
  int64_t depth_;
  Floats data_;
};

// ---- forward

struct Forward {
  AttentionShape s;
  HeadsSource q, k, v;
  HeadsTarget mixed;
  float* lse;
};

int64_t keys_of(const AttentionShape& s, int64_t query_end) {
  return s.is_causal ? std::min(s.keys, query_end) : s.keys;
}

// The queries of a range and all heads that share one head of keys.
class ForwardTask {
 public:
  ForwardTask(const Forward& call, int64_t batch, int64_t key_head, int64_t begin, int64_t end)
      : call_(call),
        s_(call.s),
        kernels_(moe::tile_kernels()),
        batch_(batch),
        begin_(begin),
        end_(end),
        keys_(keys_of(call.s, end), call.s.dim),
        values_(call.s.value_dim, keys_of(call.s, end)),
        left_(kMaxTileRows * kLeftStride),
        scores_(kMaxTileRows * kLeftStride),
        mixed_(kQueryStrips * kMaxTileRows * padded(call.s.value_dim)) {
    keys_.pack_tokens(head_of(call.k, batch, key_head), 0, keys_of(s_, end));
    values_.pack_elements(head_of(call.v, batch, key_head), 0, keys_of(s_, end));
  }

  void run(int64_t head) {
    const int64_t rows_of_block = kQueryStrips * kernels_.max_rows;
    for (int64_t first = begin_; first < end_; first += rows_of_block) {
      run_block(head, first, std::min(end_, first + rows_of_block));
    }
  }

 private:
  void run_block(int64_t head, int64_t first, int64_t end) {
    const Head queries = head_of(call_.q, batch_, head);
    std::fill_n(states_, end - first, RowState{});
    for (int64_t key = 0; key < keys_of(s_, end); key += kernels_.depth) {
      for (int64_t query = first; query < end; query += kernels_.max_rows) {
        const int64_t rows = std::min(kernels_.max_rows, end - query);
        const int64_t key_end = std::min(key + kernels_.depth, keys_of(s_, query + rows));
        if (key < key_end) {
          add_keys(queries, query, rows, key, key_end - key, query - first);
        }
      }
    }
    const int64_t stride = padded(s_.value_dim);
    float* lse = call_.lse + (batch_ * s_.heads + head) * s_.queries;
    for (int64_t i = 0; i < end - first; ++i) {
      scale_row(mixed_.get() + i * stride, s_.value_dim, 1.0F / states_[i].sum);
      lse[first + i] = states_[i].max + std::log(states_[i].sum);
    }
    write_tokens(call_.mixed, batch_, head, first, mixed_.get(), end - first, s_.value_dim);
  }

  // The strip's results so far are those of keys before `key`, from row `at` on.
  void add_keys(
      const Head& queries, int64_t query, int64_t rows, int64_t key, int64_t count, int64_t at) {
    const int64_t stride = padded(s_.value_dim);
    float* mixed = mixed_.get() + at * stride;
    queries.pack->left_by_rows(queries.at(query), queries.stride, rows, s_.dim, left_.get());
    keys_.multiply(kernels_.by_rows, rows, left_.get(), 0, s_.dim, key / kernels_.columns,
                   keys_.count_for(key + count), scores_.get(), kLeftStride, false);
    for (int64_t i = 0; i < rows; ++i) {
      float* scores = scores_.get() + i * kLeftStride;
      const int64_t seen =
          s_.is_causal ? std::clamp(query + i + 1 - key, int64_t{0}, count) : count;
      if (seen > 0) {
        const float factor = softmax_row(scores, seen, s_.scale, states_[at + i]);
        if (key > 0) {
          scale_row(mixed + i * stride, s_.value_dim, factor);
        }
      }
      std::fill(scores + seen, scores + count, 0.0F);
    }
    values_.multiply(kernels_.by_rows, rows, scores_.get(), key, count, 0, values_.num_panels(),
                     mixed, stride, key > 0);
  }

  const Forward& call_;
  const AttentionShape& s_;
  const TileKernels& kernels_;
  int64_t batch_, begin_, end_;
  Panels keys_, values_;
  Floats left_, scores_, mixed_;
  RowState states_[kQueryStrips * kMaxTileRows];
};

// ---- backward

struct Backward {
  AttentionShape s;
  AttentionPass pass;
  HeadsTarget grad_q, grad_k, grad_v;
};

// All heads that share one head of keys. Scores have a row for each key and a column for each
// query: as such they are the left side of the products for keys and values.
class BackwardTask {
 public:
  BackwardTask(const Backward& call, int64_t batch, int64_t key_head)
      : call_(call),
        s_(call.s),
        kernels_(moe::tile_kernels()),
        batch_(batch),
        k_(head_of(call.pass.k, batch, key_head)),
        v_(head_of(call.pass.v, batch, key_head)),
        keys_(s_.dim, s_.keys),
        queries_by_token_(kGradQueries, s_.dim),
        grads_by_token_(kGradQueries, s_.value_dim),
        queries_(s_.dim, kGradQueries),
        grads_(s_.value_dim, kGradQueries),
        left_(kMaxTileRows * kLeftStride),
        other_left_(kMaxTileRows * kLeftStride),
        weights_(kMaxTileRows * kLeftStride),
        grad_scores_(kMostGradKeys * kLeftStride),
        grad_q_(kGradQueries * padded(s_.dim)),
        grad_k_(s_.keys * padded(s_.dim)),
        grad_v_(s_.keys * padded(s_.value_dim)) {
    keys_.pack_elements(k_, 0, s_.keys);
    std::fill_n(grad_k_.get(), s_.keys * padded(s_.dim), 0.0F);
    std::fill_n(grad_v_.get(), s_.keys * padded(s_.value_dim), 0.0F);
  }

  void run(int64_t head) {
    for (int64_t first = 0; first < s_.queries; first += kGradQueries) {
      run_block(head, first, std::min(kGradQueries, s_.queries - first));
    }
  }

  void write(int64_t key_head) const {
    write_tokens(call_.grad_k, batch_, key_head, 0, grad_k_.get(), s_.keys, s_.dim);
    write_tokens(call_.grad_v, batch_, key_head, 0, grad_v_.get(), s_.keys, s_.value_dim);
  }

 private:
  void run_block(int64_t head, int64_t first, int64_t count) {
    const Head q = head_of(call_.pass.q, batch_, head);
    const Head grad = head_of(call_.pass.grad, batch_, head);
    find_deltas(grad, head_of(call_.pass.mixed, batch_, head), first, count);
    lse_ = call_.pass.lse + (batch_ * s_.heads + head) * s_.queries + first;
    queries_by_token_.pack_tokens(q, first, count);
    grads_by_token_.pack_tokens(grad, first, count);
    queries_.pack_elements(q, first, count);
    grads_.pack_elements(grad, first, count);
    const int64_t key_end = keys_of(s_, first + count);
    const int64_t keys_of_block = base::align_up(kGradKeys, kernels_.max_rows);
    for (int64_t key = 0; key < key_end; key += keys_of_block) {
      const int64_t end = std::min(key_end, key + keys_of_block);
      for (int64_t at = key; at < end; at += kernels_.max_rows) {
        add_strip(first, count, at, std::min(kernels_.max_rows, end - at),
                  grad_scores_.get() + (at - key) * kLeftStride);
      }
      add_to_queries(first, count, key, end - key);
    }
    write_tokens(call_.grad_q, batch_, head, first, grad_q_.get(), count, s_.dim);
  }

  // Products of the results with their gradients.
  void find_deltas(const Head& grad, const Head& mixed, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; i += kernels_.max_rows) {
      const int64_t rows = std::min(kernels_.max_rows, count - i);
      grad.pack->left_by_rows(grad.at(first + i), grad.stride, rows, s_.value_dim, left_.get());
      mixed.pack->left_by_rows(mixed.at(first + i), mixed.stride, rows, s_.value_dim,
                               other_left_.get());
      for (int64_t row = 0; row < rows; ++row) {
        delta_[i + row] = dot_rows(left_.get() + row * kLeftStride,
                                   other_left_.get() + row * kLeftStride, s_.value_dim);
      }
    }
  }

  // Gradients of a strip of keys and values; leaves those of their scores in `grad_scores`.
  void add_strip(int64_t first, int64_t count, int64_t key, int64_t rows, float* grad_scores) {
    // Earlier queries attend to none of these keys.
    const int64_t skipped = s_.is_causal ? std::max(int64_t{0}, key - first) : 0;
    const int64_t panel = skipped / kernels_.columns;
    const int64_t begin = panel * kernels_.columns;
    float* weights = weights_.get();
    k_.pack->left_by_rows(k_.at(key), k_.stride, rows, s_.dim, left_.get());
    queries_by_token_.multiply(kernels_.by_rows, rows, left_.get(), 0, s_.dim, panel,
                               queries_by_token_.num_panels(), weights + begin, kLeftStride, false);
    v_.pack->left_by_rows(v_.at(key), v_.stride, rows, s_.value_dim, left_.get());
    grads_by_token_.multiply(kernels_.by_rows, rows, left_.get(), 0, s_.value_dim, panel,
                             grads_by_token_.num_panels(), grad_scores + begin, kLeftStride, false);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t from = s_.is_causal ? std::max(int64_t{0}, key + i - first) : 0;
      const int64_t seen_from = std::min(from, count);
      float* row = weights + i * kLeftStride;
      float* grad_row_of = grad_scores + i * kLeftStride;
      std::fill(row + begin, row + seen_from, 0.0F);
      std::fill(grad_row_of, grad_row_of + seen_from, 0.0F);
      grad_row(row + seen_from, grad_row_of + seen_from, lse_ + seen_from, delta_ + seen_from,
               s_.scale, count - seen_from);
    }
    grads_.multiply(kernels_.by_rows, rows, weights + begin, begin, count - begin, 0,
                    grads_.num_panels(), grad_v_.get() + key * padded(s_.value_dim),
                    padded(s_.value_dim), true);
    queries_.multiply(kernels_.by_rows, rows, grad_scores + begin, begin, count - begin, 0,
                      queries_.num_panels(), grad_k_.get() + key * padded(s_.dim), padded(s_.dim),
                      true);
  }

  void add_to_queries(int64_t first, int64_t count, int64_t key, int64_t num_keys) {
    const PackKernels& pack = moe::pack_kernels(moe::NumberFormat::kFloat32);
    for (int64_t i = 0; i < count; i += kernels_.max_rows) {
      const int64_t rows = std::min(kernels_.max_rows, count - i);
      const int64_t seen = std::min(num_keys, keys_of(s_, first + i + rows) - key);
      if (seen > 0) {
        pack.left_by_depth(grad_scores_.get() + i, kLeftStride, rows, seen, kLeftStride - i,
                           left_.get());
        keys_.multiply(kernels_.by_depth, rows, left_.get(), key, seen, 0, keys_.num_panels(),
                       grad_q_.get() + i * padded(s_.dim), padded(s_.dim), key > 0);
      }
    }
  }

  const Backward& call_;
  const AttentionShape& s_;
  const TileKernels& kernels_;
  int64_t batch_;
  Head k_, v_;
  Panels keys_;                               // by elements
  Panels queries_by_token_, grads_by_token_;  // of a block of queries
  Panels queries_, grads_;                    // by elements
  Floats left_, other_left_, weights_, grad_scores_, grad_q_, grad_k_, grad_v_;
  float delta_[kGradQueries];
  const float* lse_ = nullptr;
};

}  // namespace

void attention(const AttentionShape& shape,
               const HeadsSource& q,
               const HeadsSource& k,
               const HeadsSource& v,
               const HeadsTarget& mixed,
               float* lse,
               int num_threads) {
  const Forward call{.s = shape, .q = q, .k = k, .v = v, .mixed = mixed, .lse = lse};
  const int64_t pairs = shape.batch * shape.key_heads;
  // Whole blocks of queries, because where one begins decides about the order of sums.
  const int64_t block = kQueryStrips * moe::tile_kernels().max_rows;
  const int64_t blocks = base::ceil_div(shape.queries, block);
  const int64_t wanted =
      num_threads == 1 ? 1 : base::ceil_div(kTasksPerThread * num_threads, pairs);
  const int64_t per_task = base::ceil_div(blocks, std::min(blocks, wanted)) * block;
  const int64_t ranges = base::ceil_div(shape.queries, per_task);
  base::parallel_for(pairs * ranges, 1, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t pair = index / ranges;
      // The last range of causal attention takes the longest, and begins first.
      const int64_t first = (ranges - 1 - index % ranges) * per_task;
      const int64_t key_head = pair % shape.key_heads;
      ForwardTask task(call, pair / shape.key_heads, key_head, first,
                       std::min(shape.queries, first + per_task));
      const int64_t heads = shape.heads / shape.key_heads;
      for (int64_t head = key_head * heads; head < (key_head + 1) * heads; ++head) {
        task.run(head);
      }
    }
  });
}

void attention_backward(const AttentionShape& shape,
                        const AttentionPass& pass,
                        const HeadsTarget& grad_q,
                        const HeadsTarget& grad_k,
                        const HeadsTarget& grad_v,
                        int num_threads) {
  const Backward call{
      .s = shape, .pass = pass, .grad_q = grad_q, .grad_k = grad_k, .grad_v = grad_v};
  const int64_t pairs = shape.batch * shape.key_heads;
  base::parallel_for(pairs, 1, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t key_head = pair % shape.key_heads;
      BackwardTask task(call, pair / shape.key_heads, key_head);
      const int64_t heads = shape.heads / shape.key_heads;
      for (int64_t head = key_head * heads; head < (key_head + 1) * heads; ++head) {
        task.run(head);
      }
      task.write(key_head);
    }
  });
}

}  // namespace megacore::layers
