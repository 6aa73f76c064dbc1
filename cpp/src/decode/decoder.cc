#include "megacore/decode/decoder.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "megacore/base/check.h"
#include "megacore/moe/router.h"

namespace megacore::decode {
namespace {

using Floats = std::vector<float>;

Floats floats(int64_t count) { return Floats(static_cast<size_t>(count)); }

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

float gelu(float x) { return x * sigmoid(1.5957691216057308F * (x + 0.044715F * x * x * x)); }

void cap(float limit, Floats& values) {
  for (float& value : values) {
    value = limit * std::tanh(value / limit);
  }
}

float mean_square(const float* x, int64_t count) {
  float sum = 0.0F;
  for (int64_t i = 0; i < count; ++i) {
    sum += x[i] * x[i];
  }
  return sum / static_cast<float>(count);
}

void scale_by(float factor, const float* weight, float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] = x[i] * factor * weight[i];
  }
}

void normalize_row(const Norm& norm, float* x, int64_t count) {
  if (norm.is_layer_norm) {
    float mean = 0.0F;
    for (int64_t i = 0; i < count; ++i) {
      mean += x[i];
    }
    mean /= static_cast<float>(count);
    for (int64_t i = 0; i < count; ++i) {
      x[i] -= mean;
    }
  }
  scale_by(1.0F / std::sqrt(mean_square(x, count) + norm.eps), norm.weight, x, count);
  for (int64_t i = 0; norm.bias != nullptr && i < count; ++i) {
    x[i] += norm.bias[i];
  }
}

void normalize(const Norm& norm, int64_t width, Floats& x) {
  for (size_t at = 0; norm.weight != nullptr && at < x.size(); at += static_cast<size_t>(width)) {
    normalize_row(norm, x.data() + at, width);
  }
}

void add(const Floats& from, Floats& to) {
  for (size_t i = 0; i < to.size(); ++i) {
    to[i] += from[i];
  }
}

// y = silu(gate) * up and its kin; x = [gate, up].
void activate(Gate kind, const float* x, float* y, int64_t width) {
  const float* up = x + width;
  for (int64_t i = 0; i < width; ++i) {
    switch (kind) {
      case Gate::kSwiglu:
        y[i] = x[i] * sigmoid(x[i]) * up[i];
        break;
      case Gate::kGeglu:
        y[i] = gelu(x[i]) * up[i];
        break;
      case Gate::kGelu:
        y[i] = gelu(x[i]);
        break;
      case Gate::kClampedSwiglu: {
        const float gate = std::min(x[i], 7.0F);
        y[i] = (std::clamp(up[i], -7.0F, 7.0F) + 1.0F) * gate * sigmoid(1.702F * gate);
        break;
      }
    }
  }
}

class Decoder {
 public:
  Decoder(const Model& model, const Step& step)
      : model_(model), step_(step), rows_(static_cast<int64_t>(step.tokens.size())) {}

  Floats hidden() {
    Floats x = floats(rows_ * model_.hidden);
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t token = step_.tokens[static_cast<size_t>(row)];
      std::copy_n(model_.embedding + token * model_.hidden, model_.hidden,
                  x.data() + row * model_.hidden);
    }
    for (size_t i = 0; i < model_.layers.size(); ++i) {
      run(model_.layers[i], step_.pasts[i], x);
    }
    normalize(model_.final_norm, model_.hidden, x);
    return x;
  }

  void project(const Linear& layer, const Floats& x, Floats& y) const {
    linear(x.data(), layer.weight, layer.bias, y.data(), rows_,
           static_cast<int64_t>(y.size()) / rows_, static_cast<int64_t>(x.size()) / rows_,
           step_.num_threads);
  }

 private:
  void run(const Layer& layer, float* past, Floats& x) {
    Floats inner = x;
    normalize(layer.attention_norm, model_.hidden, inner);
    inner = attention(layer.attention, past, inner);
    normalize(layer.attention_output_norm, model_.hidden, inner);
    add(inner, x);
    inner = x;
    normalize(layer.mlp_norm, model_.hidden, inner);
    inner = layer.experts.num_experts == 0 ? mlp(layer.mlp, inner) : experts(layer, inner);
    normalize(layer.mlp_output_norm, model_.hidden, inner);
    add(inner, x);
  }

  Floats attention(const Attention& part, float* past, const Floats& x) {
    const int64_t slots = part.q_per_kv + 2;
    const int64_t token_numel = part.num_groups * part.head_dim;
    Floats qkv = floats(rows_ * part.num_groups * slots * part.head_dim);
    project(part.qkv, x, qkv);
    float* added = past + step_.length * 2 * rows_ * token_numel;
    for (int64_t row = 0; row < rows_; ++row) {
      float* heads = qkv.data() + row * slots * token_numel;
      norm_heads(part, heads);
      for (int64_t group = 0; group < part.num_groups; ++group) {
        float* first = heads + group * slots * part.head_dim;
        for (int64_t slot = 0; slot < slots - 1; ++slot) {
          rotate(first + slot * part.head_dim);
        }
        float* key = added + row * token_numel + group * part.head_dim;
        std::copy_n(first + part.q_per_kv * part.head_dim, part.head_dim, key);
        std::copy_n(first + (part.q_per_kv + 1) * part.head_dim, part.head_dim,
                    key + rows_ * token_numel);
      }
    }
    const Floats mixed = mix(part, past, qkv);
    Floats output = floats(rows_ * model_.hidden);
    project(part.output, mixed, output);
    return output;
  }

  // Norms of the queries and of the keys of one token.
  static void norm_heads(const Attention& part, float* heads) {
    if (part.q_norm == nullptr) {
      return;
    }
    const int64_t slots = part.q_per_kv + 2;
    const int64_t dim = part.head_dim;
    float squares[2] = {};
    for (int64_t head = 0; head < part.num_groups * slots; ++head) {
      if (part.norm_over_heads && head % slots <= part.q_per_kv) {
        const bool is_key = head % slots == part.q_per_kv;
        squares[is_key] += mean_square(heads + head * dim, dim) /
                           static_cast<float>(part.num_groups * (is_key ? 1 : part.q_per_kv));
      }
    }
    for (int64_t head = 0; head < part.num_groups * slots; ++head) {
      const int64_t group = head / slots;
      const int64_t slot = head % slots;
      if (slot > part.q_per_kv) {
        continue;
      }
      const bool is_key = slot == part.q_per_kv;
      float* x = heads + head * dim;
      const float* weight = is_key ? part.k_norm : part.q_norm;
      if (part.norm_over_heads) {
        weight += (is_key ? group : group * part.q_per_kv + slot) * dim;
      }
      const float square = part.norm_over_heads ? squares[is_key] : mean_square(x, dim);
      scale_by(1.0F / std::sqrt(square + part.qk_norm_eps), weight, x, dim);
    }
  }

  void rotate(float* x) const {
    const int64_t half = model_.num_rotated / 2;
    const float* cos = step_.cos + step_.length * half;
    const float* sin = step_.sin + step_.length * half;
    for (int64_t i = 0; i < half; ++i) {
      const float first = x[i];
      const float second = x[half + i];
      x[i] = first * cos[i] - second * sin[i];
      x[half + i] = second * cos[i] + first * sin[i];
    }
  }

  Floats mix(const Attention& part, const float* past, const Floats& qkv) {
    const int64_t dim = part.head_dim;
    const int64_t token_numel = part.num_groups * dim;
    const int64_t stride = 2 * rows_ * token_numel;
    const int64_t count = step_.length + 1;
    const int64_t first = part.window > 0 ? std::max(int64_t{0}, count - part.window) : 0;
    scores_.resize(static_cast<size_t>(count));
    Floats mixed = floats(rows_ * part.num_groups * part.q_per_kv * dim);
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t head = 0; head < part.num_groups * part.q_per_kv; ++head) {
        const int64_t group = head / part.q_per_kv;
        const int64_t slot = group * (part.q_per_kv + 2) + head % part.q_per_kv;
        const float* keys = past + first * stride + row * token_numel + group * dim;
        const float* query = qkv.data() + row * (part.q_per_kv + 2) * token_numel + slot * dim;
        attend({.query = query,
                .keys = keys,
                .values = keys + rows_ * token_numel,
                .stride = stride,
                .count = count - first,
                .dim = dim,
                .scale = part.scale,
                .softcap = part.softcap,
                .sink = part.sinks == nullptr ? nullptr : part.sinks + head},
               scores_.data(), mixed.data() + (row * part.num_groups * part.q_per_kv + head) * dim);
      }
    }
    return mixed;
  }

  Floats mlp(const Mlp& part, const Floats& x) const {
    Floats wide = floats(rows_ * 2 * part.width);
    project({part.gate_up, nullptr}, x, wide);
    Floats inner = floats(rows_ * part.width);
    for (int64_t row = 0; row < rows_; ++row) {
      activate(part.gate, wide.data() + row * 2 * part.width, inner.data() + row * part.width,
               part.width);
    }
    Floats output = floats(rows_ * model_.hidden);
    project({part.down, nullptr}, inner, output);
    return output;
  }

  Floats experts(const Layer& layer, const Floats& x) const {
    const Experts& part = layer.experts;
    Floats logits = floats(rows_ * part.num_experts);
    project(part.router, x, logits);
    std::vector<int64_t> chosen(static_cast<size_t>(rows_ * part.top_k));
    Floats weights = floats(rows_ * part.top_k);
    moe::route(logits.data(), part.selection_bias, false,
               {.num_tokens = rows_,
                .num_experts = part.num_experts,
                .top_k = part.top_k,
                .num_pools = 1,
                .is_sigmoid = part.is_sigmoid,
                .softmax_after_top_k = part.softmax_after_top_k,
                .normalize = part.normalize,
                .scaling = part.scaling_factor},
               {.probs = weights.data(), .ids = chosen.data()}, 1);
    Floats output = floats(rows_ * model_.hidden);
    for (int64_t copy = 0; copy < rows_ * part.top_k; ++copy) {
      const int64_t row = copy / part.top_k;
      add_expert(part, chosen[static_cast<size_t>(copy)], weights[static_cast<size_t>(copy)],
                 x.data() + row * model_.hidden, output.data() + row * model_.hidden);
    }
    if (layer.mlp.down != nullptr) {
      Floats shared = mlp(layer.mlp, x);
      if (part.shared_gate != nullptr) {
        Floats gates = floats(rows_);
        project({part.shared_gate, nullptr}, x, gates);
        for (size_t i = 0; i < shared.size(); ++i) {
          shared[i] *= sigmoid(gates[i / static_cast<size_t>(model_.hidden)]);
        }
      }
      add(shared, output);
    }
    return output;
  }

  void add_expert(
      const Experts& part, int64_t expert, float weight, const float* x, float* output) const {
    const int64_t wide_width = part.gate == Gate::kGelu ? part.width : 2 * part.width;
    const auto of_expert = [expert](const float* all, int64_t numel) {
      return all == nullptr ? nullptr : all + expert * numel;
    };
    Floats wide = floats(wide_width);
    linear(x, of_expert(part.fc1.weight, wide_width * model_.hidden),
           of_expert(part.fc1.bias, wide_width), wide.data(), 1, wide_width, model_.hidden,
           step_.num_threads);
    Floats inner = floats(part.width);
    activate(part.gate, wide.data(), inner.data(), part.width);
    Floats result = floats(model_.hidden);
    linear(inner.data(), of_expert(part.fc2.weight, model_.hidden * part.width),
           of_expert(part.fc2.bias, model_.hidden), result.data(), 1, model_.hidden, part.width,
           step_.num_threads);
    for (int64_t i = 0; i < model_.hidden; ++i) {
      output[i] += weight * result[static_cast<size_t>(i)];
    }
  }

  const Model& model_;
  const Step& step_;
  int64_t rows_;
  Floats scores_;
};

void check(const Model& model, const Step& step) {
  MC_REQUIRE(step.num_threads >= 1, "num_threads must be at least 1, got {}", step.num_threads);
  MC_REQUIRE(!step.tokens.empty(), "tokens must have at least 1 token, got 0");
  MC_REQUIRE(step.length >= 0, "length must be at least 0, got {}", step.length);
  MC_REQUIRE(step.pasts.size() == model.layers.size(), "pasts must have {} addresses, got {}",
             model.layers.size(), step.pasts.size());
  for (const int64_t token : step.tokens) {
    MC_REQUIRE(token >= 0 && token < model.vocab, "a token must be in [0, {}), got {}", model.vocab,
               token);
  }
}

}  // namespace

void decode(const Model& model, const Step& step, float* logits) {
  check(model, step);
  Decoder decoder(model, step);
  const Floats x = decoder.hidden();
  Floats scores = floats(static_cast<int64_t>(step.tokens.size()) * model.vocab);
  decoder.project({model.head, nullptr}, x, scores);
  if (model.logit_softcap > 0.0F) {
    cap(model.logit_softcap, scores);
  }
  std::copy(scores.begin(), scores.end(), logits);
}

}  // namespace megacore::decode
