"""One token per sequence through a whole model in one native call, for generation.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megacore import _core
from megacore.models.attention import Attention
from megacore.models.gpt import GPTChunk
from megacore.models.layers import HeadNorms, LayerNorm, RMSNorm
from megacore.models.moe_block import GatedExpert, MoEBlock
from megacore.models.past import Past
from megacore.models.transformer import MLP, TransformerLayer
from megacore.moe.experts import GroupedExperts
from megacore.moe.router import TopKRouter
from megacore.ops.fp8 import fp8_linear

# Sequences for which reading each weight once for all of them pays; for more, torch is faster.
MAX_SEQUENCES = 8
_GATES = {
    "swiglu": _core.Gate.SWIGLU,
    "geglu": _core.Gate.GEGLU,
    "gelu": _core.Gate.GELU,
    "clamped_swiglu": _core.Gate.CLAMPED_SWIGLU,
}


class Decoder:
    """A model's weights as the native call takes them: their addresses, and the sizes.

    The weights must stay where they are while the decoder is used.

    Args:
        model: A model that `can_decode` accepts.
    """

    def __init__(self, model: GPTChunk) -> None:
        assert model.embedding is not None
        assert model.head is not None
        self._model = model
        native = _core.DecodedModel()
        native.hidden, native.vocab = model.shape.hidden, model.shape.vocab
        native.num_rotated = 2 * model.tables.cos.shape[1]
        native.embedding = _address(model.embedding.words.weight)
        native.head = _address(model.head.weight)
        native.logit_softcap = model.head.softcap or 0.0
        assert model.final_norm is not None
        native.final_norm = _norm(model.final_norm)
        native.layers = [_layer(layer) for layer in model.layers]  # type: ignore[arg-type]
        self._native = native

    def logits(self, tokens: Sequence[int], pasts: Sequence[Past]) -> Tensor:
        """Append one token to each sequence and return the scores of the next, ``(B, V)``, float32.

        Args:
            tokens: The tokens, at most ``MAX_SEQUENCES``.
            pasts: Keys and values of each layer, of at least one earlier token; extended.
        """
        length = len(pasts[0])
        cos, sin = self._model.tables(length + 1)
        logits_BV = torch.empty(len(tokens), self._native.vocab)
        _core.decode(
            self._native,
            tokens=tokens,
            length=length,
            pasts=[past.grow().data_ptr() for past in pasts],
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            logits=logits_BV.data_ptr(),
            num_threads=torch.get_num_threads(),
        )
        return logits_BV


def can_decode(model: GPTChunk) -> bool:
    """Return whether `Decoder` has all parts of a model: fp32 on the CPU, no latent attention.

    It has no choice of experts by groups, nor limits on their tokens.
    """
    tables = (model.tables.cos, model.tables.sin)
    tensors = (*model.parameters(), *model.layers.buffers(), *tables)
    if any(not t.is_cpu or not t.is_contiguous() for t in tensors):
        return False
    if any(t.is_floating_point() and t.dtype != torch.float32 for t in tensors):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    for layer in model.layers:
        if type(layer) is not TransformerLayer or type(layer.attention) is not Attention:
            return False
        if layer.attention.qkv.linear is fp8_linear:
            return False
        if isinstance(layer.mlp, MoEBlock) and not _can_route(layer.mlp.moe.router):
            return False
    return True


def _can_route(router: TopKRouter) -> bool:
    config = router.config
    has_groups = config.groups_top_k < config.num_groups
    return not (has_groups or router.force_balanced or config.capacity_factor is not None)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _linear(weight: Tensor, bias: Tensor | None) -> _core.DecodedLinear:
    native = _core.DecodedLinear()
    native.weight, native.bias = _address(weight), _address(bias)
    return native


def _norm(norm: nn.Module) -> _core.DecodedNorm:
    native = _core.DecodedNorm()
    if isinstance(norm, RMSNorm | LayerNorm):
        native.weight, native.eps = _address(norm.weight), norm.eps
    if isinstance(norm, LayerNorm):
        native.bias, native.is_layer_norm = _address(norm.bias), True
    return native


def _layer(layer: TransformerLayer) -> _core.DecodedLayer:
    assert isinstance(layer.attention, Attention)
    native = _core.DecodedLayer()
    native.attention_norm = _norm(layer.attention_norm)
    native.attention = _attention(layer.attention)
    native.attention_output_norm = _norm(layer.attention_output_norm)
    native.mlp_norm = _norm(layer.mlp_norm)
    native.mlp_output_norm = _norm(layer.mlp_output_norm)
    if isinstance(layer.mlp, MLP):
        native.mlp = _mlp(layer.mlp)
        return native
    moe = layer.mlp.moe
    experts = _experts(moe.experts, moe.router)
    shared = moe.shared
    if isinstance(shared, GatedExpert):
        experts.shared_gate = _address(shared.gate)
        shared = shared.mlp
    if isinstance(shared, MLP):
        native.mlp = _mlp(shared)
    native.experts = experts
    return native


def _attention(attention: Attention) -> _core.DecodedAttention:
    native = _core.DecodedAttention()
    rule, dim = attention.rule, attention.head_dim
    native.num_groups, native.head_dim = attention.num_local_groups, dim
    native.q_per_kv = attention.output.weight.shape[1] // (dim * attention.num_local_groups)
    native.window, native.softcap = rule.window or 0, rule.softcap or 0.0
    native.scale = dim**-0.5 if rule.scale is None else rule.scale
    native.qkv = _linear(attention.qkv.weight, attention.qkv.bias)
    native.output = _linear(attention.output.weight, attention.output.bias)
    norms = attention.qk_norm
    if norms is not None:
        native.q_norm, native.k_norm = _address(norms.q_weight), _address(norms.k_weight)
        native.norm_over_heads = not isinstance(norms, HeadNorms)
        native.qk_norm_eps = norms.eps
    native.sinks = _address(attention.sinks)
    return native


def _mlp(mlp: MLP) -> _core.DecodedMlp:
    native = _core.DecodedMlp()
    native.gate_up, native.down = _address(mlp.gate_up.weight), _address(mlp.down.weight)
    native.width = mlp.down.weight.shape[1]
    native.gate = _GATES[mlp.activation]
    return native


def _experts(experts: GroupedExperts, router: TopKRouter) -> _core.DecodedExperts:
    native, config, biases = _core.DecodedExperts(), router.config, experts.biases
    native.num_experts, native.top_k = config.num_experts, config.top_k
    native.router = _linear(router.weight, router.bias)
    native.selection_bias = _address(router.expert_bias)
    native.is_sigmoid = config.score_function == "sigmoid"
    native.softmax_after_top_k = config.softmax_after_top_k
    native.normalize, native.scaling_factor = config.normalize, config.scaling_factor
    native.fc1 = _linear(experts.fc1, None if biases is None else biases.fc1)
    native.fc2 = _linear(experts.fc2, None if biases is None else biases.fc2)
    native.width = experts.fc2.shape[2]
    native.gate = _GATES[experts.activation]
    return native
