// The next token of a text: all layers of a model for one new token per sequence, in one call.
//
// With one token per sequence a layer has microseconds of arithmetic, so that calling each of its
// operations on its own takes nearly all of the time. fp32; weights, keys and values are torch's.
//
// Shapes: B sequences, H hidden, G key heads, Q query heads per key head, D head dimension, F inner
// width, E experts, V vocabulary. Matrices are (outputs, inputs). A null pointer: there is none.

#pragma once

#include <cstdint>
#include <vector>

namespace megacore::decode {

enum class Gate : uint8_t { kSwiglu, kGeglu, kGelu, kClampedSwiglu };

struct Norm {
  const float* weight = nullptr;  // null: the norm changes nothing
  const float* bias = nullptr;
  float eps = 0.0F;
  bool is_layer_norm = false;
};

struct Linear {
  const float* weight = nullptr;
  const float* bias = nullptr;
};

struct Attention {
  int64_t num_groups = 0;
  int64_t q_per_kv = 0;
  int64_t head_dim = 0;
  int64_t window = 0;    // 0: all tokens
  float softcap = 0.0F;  // 0: none
  float scale = 0.0F;
  Linear qkv;                     // (G, Q + 2, D) outputs
  Linear output;                  // (G, Q, D) inputs
  const float* q_norm = nullptr;  // (D), or (G, Q, D) with norm_over_heads
  const float* k_norm = nullptr;  // (D), or (G, D)
  bool norm_over_heads = false;   // one mean square for all heads
  float qk_norm_eps = 0.0F;
  const float* sinks = nullptr;  // (G, Q)
};

struct Mlp {
  const float* gate_up = nullptr;  // (2 F, H)
  const float* down = nullptr;     // (H, F)
  int64_t width = 0;
  Gate gate = Gate::kSwiglu;
};

struct Experts {
  int64_t num_experts = 0;  // 0: the layer has an MLP
  int64_t top_k = 0;
  Linear router;
  const float* selection_bias = nullptr;  // added to scores for the choice only, (E)
  bool is_sigmoid = false;
  bool softmax_after_top_k = false;
  bool normalize = false;
  float scaling_factor = 1.0F;
  Linear fc1;  // E times (2 F, H), or (F, H) for kGelu
  Linear fc2;  // E times (H, F)
  int64_t width = 0;
  Gate gate = Gate::kSwiglu;
  const float* shared_gate = nullptr;  // (1, H)
};

struct Layer {
  Norm attention_norm;
  Attention attention;
  Norm attention_output_norm;
  Norm mlp_norm;
  Mlp mlp;  // the shared expert in a layer with experts; null matrices: none
  Experts experts;
  Norm mlp_output_norm;
};

struct Model {
  int64_t hidden = 0;
  int64_t vocab = 0;
  int64_t num_rotated = 0;
  const float* embedding = nullptr;
  const float* head = nullptr;  // (V, H)
  float logit_softcap = 0.0F;   // 0: none
  Norm final_norm;
  std::vector<Layer> layers;
};

struct Step {
  std::vector<int64_t> tokens;  // of each sequence
  int64_t length;               // tokens before it
  std::vector<float*> pasts;    // of each layer, (>= length + 1, 2, B, G, D): keys, then values
  const float* cos;             // (> length, num_rotated / 2)
  const float* sin;
  int num_threads;
};

// Appends keys and values of the tokens to `pasts` and writes the scores of the next ones, (B, V).
// REQUIRES: tokens in the vocabulary, one past per layer, num_threads >= 1.
void decode(const Model& model, const Step& step, float* logits);

}  // namespace megacore::decode
