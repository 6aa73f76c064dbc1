#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings.h"
#include "megacore/decode/decoder.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

// An attribute that holds an address: Tensor.data_ptr(), or 0 for none.
template <typename T>
void address(py::class_<T>& type, const char* name, const float* T::* member) {
  type.def_property(
      name, [member](const T& self) { return reinterpret_cast<uintptr_t>(self.*member); },
      [member](T& self, uintptr_t value) { self.*member = pointer<const float>(value); });
}

void bind_norm(py::module_& module) {
  using decode::Norm;
  py::class_<Norm> type(module, "DecodedNorm");
  type.def(py::init<>());
  address(type, "weight", &Norm::weight);
  address(type, "bias", &Norm::bias);
  type.def_readwrite("eps", &Norm::eps).def_readwrite("is_layer_norm", &Norm::is_layer_norm);
}

void bind_linear(py::module_& module) {
  using decode::Linear;
  py::class_<Linear> type(module, "DecodedLinear");
  type.def(py::init<>());
  address(type, "weight", &Linear::weight);
  address(type, "bias", &Linear::bias);
}

void bind_attention(py::module_& module) {
  using decode::Attention;
  py::class_<Attention> type(module, "DecodedAttention");
  type.def(py::init<>())
      .def_readwrite("num_groups", &Attention::num_groups)
      .def_readwrite("q_per_kv", &Attention::q_per_kv)
      .def_readwrite("head_dim", &Attention::head_dim)
      .def_readwrite("window", &Attention::window)
      .def_readwrite("softcap", &Attention::softcap)
      .def_readwrite("scale", &Attention::scale)
      .def_readwrite("qkv", &Attention::qkv)
      .def_readwrite("output", &Attention::output)
      .def_readwrite("norm_over_heads", &Attention::norm_over_heads)
      .def_readwrite("qk_norm_eps", &Attention::qk_norm_eps);
  address(type, "q_norm", &Attention::q_norm);
  address(type, "k_norm", &Attention::k_norm);
  address(type, "sinks", &Attention::sinks);
}

void bind_mlp(py::module_& module) {
  using decode::Mlp;
  py::native_enum<decode::Gate>(module, "Gate", "enum.IntEnum")
      .value("SWIGLU", decode::Gate::kSwiglu)
      .value("GEGLU", decode::Gate::kGeglu)
      .value("GELU", decode::Gate::kGelu)
      .value("CLAMPED_SWIGLU", decode::Gate::kClampedSwiglu)
      .finalize();
  py::class_<Mlp> type(module, "DecodedMlp");
  type.def(py::init<>()).def_readwrite("width", &Mlp::width).def_readwrite("gate", &Mlp::gate);
  address(type, "gate_up", &Mlp::gate_up);
  address(type, "down", &Mlp::down);
}

void bind_experts(py::module_& module) {
  using decode::Experts;
  py::class_<Experts> type(module, "DecodedExperts");
  type.def(py::init<>())
      .def_readwrite("num_experts", &Experts::num_experts)
      .def_readwrite("top_k", &Experts::top_k)
      .def_readwrite("router", &Experts::router)
      .def_readwrite("is_sigmoid", &Experts::is_sigmoid)
      .def_readwrite("softmax_after_top_k", &Experts::softmax_after_top_k)
      .def_readwrite("normalize", &Experts::normalize)
      .def_readwrite("scaling_factor", &Experts::scaling_factor)
      .def_readwrite("fc1", &Experts::fc1)
      .def_readwrite("fc2", &Experts::fc2)
      .def_readwrite("width", &Experts::width)
      .def_readwrite("gate", &Experts::gate);
  address(type, "selection_bias", &Experts::selection_bias);
  address(type, "shared_gate", &Experts::shared_gate);
}

void bind_layer(py::module_& module) {
  using decode::Layer;
  py::class_<Layer>(module, "DecodedLayer")
      .def(py::init<>())
      .def_readwrite("attention_norm", &Layer::attention_norm)
      .def_readwrite("attention", &Layer::attention)
      .def_readwrite("attention_output_norm", &Layer::attention_output_norm)
      .def_readwrite("mlp_norm", &Layer::mlp_norm)
      .def_readwrite("mlp", &Layer::mlp)
      .def_readwrite("experts", &Layer::experts)
      .def_readwrite("mlp_output_norm", &Layer::mlp_output_norm);
}

void bind_model(py::module_& module) {
  using decode::Model;
  py::class_<Model> type(module, "DecodedModel");
  type.def(py::init<>())
      .def_readwrite("hidden", &Model::hidden)
      .def_readwrite("vocab", &Model::vocab)
      .def_readwrite("num_rotated", &Model::num_rotated)
      .def_readwrite("logit_softcap", &Model::logit_softcap)
      .def_readwrite("final_norm", &Model::final_norm)
      .def_readwrite("layers", &Model::layers);
  address(type, "embedding", &Model::embedding);
  address(type, "head", &Model::head);
}

}  // namespace

void bind_decode(py::module_& module) {
  bind_norm(module);
  bind_linear(module);
  bind_attention(module);
  bind_mlp(module);
  bind_experts(module);
  bind_layer(module);
  bind_model(module);
  module.def(
      "decode",
      [](const decode::Model& model, std::vector<int64_t> tokens, int64_t length,
         const std::vector<uintptr_t>& pasts, uintptr_t cos, uintptr_t sin, uintptr_t logits,
         int num_threads) {
        decode::Step step{.tokens = std::move(tokens),
                          .length = length,
                          .pasts = {},
                          .cos = pointer<const float>(cos),
                          .sin = pointer<const float>(sin),
                          .num_threads = num_threads};
        for (const uintptr_t past : pasts) {
          step.pasts.push_back(pointer<float>(past));
        }
        decode::decode(model, step, pointer<float>(logits));
      },
      py::arg("model"), py::kw_only(), py::arg("tokens"), py::arg("length"), py::arg("pasts"),
      py::arg("cos"), py::arg("sin"), py::arg("logits"), py::arg("num_threads"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace megacore::bindings
