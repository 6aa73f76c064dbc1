"""Import of Llama, Mistral, Mixtral, Qwen3 and Qwen3-MoE weights from Hugging Face folders.

A folder has ``config.json`` and one or more ``*.safetensors`` files. If present,
``model.safetensors.index.json`` lists the relevant files. Nothing is downloaded, and the
``transformers`` package is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.config import ModelConfig, MoEConfig, filled
from megacore.errors import MegacoreError
from megacore.models.gpt import GPTChunk
from megacore.models.hf_files import read_config, read_tensors
from megacore.parallel.params import ShardPosition, shard
from megacore.parallel.process_groups import ProcessGroups

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen3", "qwen3_moe")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """Model imported from a folder.

    Attributes:
        chunk: The model, or this rank's part of it.
        model: Its ``[model]`` section.
        moe: Its ``[moe]`` section.
    """

    chunk: GPTChunk
    model: ModelConfig
    moe: MoEConfig


def import_hf(
    folder: str | Path,
    *,
    seq_length: int | None = None,
    groups: ProcessGroups | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ImportedModel:
    """Build a model from a folder and load its weights.

    Args:
        folder: Folder with ``config.json`` and the weights: the files listed in
            ``model.safetensors.index.json``, else ``model.safetensors``, else all
            ``*.safetensors``.
        seq_length: Tokens per sequence. Default: the maximum of the model.
        groups: Process groups of this rank, which gets its shard of every layer; there is no
            pipeline. Default: one process.
        dtype: Number format of the parameters.
        device: Device of the parameters.

    Raises:
        MegacoreError: If a file is missing, unreadable or contradicts another one, or the model
            uses an unsupported feature.
    """
    folder = Path(folder)
    model, moe = sections_from_hf(read_config(folder), seq_length=seq_length)
    chunk = GPTChunk(
        model,
        layers=range(model.num_layers),
        has_embedding=True,
        has_head=True,
        groups=ProcessGroups.single() if groups is None else groups,
        dtype=dtype,
        device=device,
        moe=moe,
    )
    weights = weights_from_hf(read_tensors(folder), model, moe)
    fill_chunk(chunk, weights, ProcessGroups.single() if groups is None else groups)
    return ImportedModel(chunk=chunk, model=model, moe=moe)


def sections_from_hf(
    config: Mapping[str, Any], *, seq_length: int | None = None
) -> tuple[ModelConfig, MoEConfig]:
    """Return the ``[model]`` and ``[moe]`` sections of a ``config.json``.

    Raises:
        MegacoreError: If the model uses an unsupported feature, or a size is missing or not a
            positive integer.
    """
    _check_supported(config)
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    bases = [source.get("rope_theta") for source in (*_rotations(config), config)]
    model = ModelConfig(
        hidden_size=hidden_size,
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads", default=num_heads),
        head_dim=_size(config, "head_dim", default=hidden_size // num_heads),
        ffn_hidden_size=_size(config, "intermediate_size"),
        vocab_size=_size(config, "vocab_size"),
        seq_length=seq_length or _size(config, "max_position_embeddings"),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope_base=float(next(filter(None, bases), 10000.0)),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        qk_norm=config["model_type"].startswith("qwen3"),
        init_std=config.get("initializer_range", 0.02),
    )
    return model, _moe_section(config)


def weights_from_hf(
    tensors: Mapping[str, Tensor], model: ModelConfig, moe: MoEConfig
) -> dict[str, Tensor]:
    """Rename and join tensors: from Hugging Face names to whole parameters of megacore.

    Experts may be separate tensors, as on the hub, or joined, as in ``transformers`` 5. The map is
    linear, so it can be applied to gradients as well.

    Args:
        tensors: By name, such as ``"model.layers.0.self_attn.q_proj.weight"``.
        model: From `sections_from_hf`.
        moe: From `sections_from_hf`.

    Raises:
        MegacoreError: If a tensor is missing or unused, or the head is tied to the embedding but
            differs from it.
    """
    source = _Source(tensors)
    embedding = source.take(EMBEDDING)
    result = {
        "embedding": _padded(embedding, model),
        "final_norm": source.take("model.norm.weight"),
    }
    if not model.tie_embeddings:
        result["head"] = _padded(source.take(HEAD), model)
    elif source.has(HEAD):
        _check_tied(embedding, source.take(HEAD))
    for layer in range(model.num_layers):
        result |= _layer(source, layer, model, moe)
    source.check_empty()
    return result


@torch.no_grad()
def fill_chunk(chunk: GPTChunk, weights: Mapping[str, Tensor], groups: ProcessGroups) -> None:
    """Copy this rank's shards of whole parameters into its chunk.

    Args:
        chunk: Any part of a model in any layout.
        weights: Whole parameters by name; additional ones are ignored.
        groups: The groups of the chunk.

    Raises:
        MegacoreError: If a parameter is missing or has another shape.
    """
    for info, parameter in chunk.param_infos():
        if info.name not in weights:
            raise MegacoreError(f"there are no weights for parameter {info.name}")
        whole = weights[info.name]
        if tuple(whole.shape) != info.full_shape:
            raise MegacoreError(
                f"weights for {info.name} have shape {tuple(whole.shape)}, but the model has "
                f"{info.full_shape}"
            )
        parameter.copy_(shard(whole, info, **vars(ShardPosition.of(info, groups))))


def _check_supported(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise MegacoreError(
            f"model_type {kind!r} cannot be imported; there are {', '.join(MODEL_TYPES)}"
        )
    # The key was `type` before it was `rope_type`; `transformers` reads both.
    rotations = [rope.get("rope_type", rope.get("type", "default")) for rope in _rotations(config)]
    lacking = {
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "sliding_window": config.get("sliding_window") is not None
        and config.get("use_sliding_window", True),
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        **{f"rope_type {rotation!r}": rotation != "default" for rotation in rotations},
    }
    found = [name for name, is_used in lacking.items() if is_used]
    if found:
        raise MegacoreError(f"the model uses {', '.join(found)}, which megacore does not have")


def _rotations(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the entries that describe the rotation: the older one first, then the newer one."""
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name) or {}
        if not isinstance(value, Mapping):
            raise MegacoreError(f"{name} = {value!r} in config.json is no object; use one or null")
        yield value


def _size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of these entries that is set, a positive integer."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None and default is not None:
        return default
    if name is None:
        raise MegacoreError(
            f"config.json has no {' or '.join(names)}, which a {config['model_type']} model needs"
        )
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise MegacoreError(
            f"{name} = {value!r} in config.json is no positive whole number; the least is 1"
        )
    return value


def _moe_section(config: Mapping[str, Any]) -> MoEConfig:
    if config["model_type"] not in ("mixtral", "qwen3_moe"):
        return MoEConfig(ffn_hidden_size=_size(config, "intermediate_size"))
    is_mixtral = config["model_type"] == "mixtral"
    num_experts = _size(config, "num_local_experts", "num_experts")
    step = _size(config, "decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    num_layers = _size(config, "num_hidden_layers")
    ffn_hidden_size = _size(config, "intermediate_size" if is_mixtral else "moe_intermediate_size")
    wanted = [i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense]
    for first in range(num_layers):
        section = MoEConfig(
            num_experts=num_experts,
            top_k=_size(config, "num_experts_per_tok"),
            ffn_hidden_size=ffn_hidden_size,
            normalize=is_mixtral or bool(config.get("norm_topk_prob")),
            first_dense_layers=first,
            layer_interval=step,
            aux_loss_coef=config.get("router_aux_loss_coef", 0.0),
        )
        if section.moe_layers(num_layers) == wanted:
            return section
    raise MegacoreError(
        f"layers {wanted} have experts; megacore has every n-th layer after the first dense ones"
    )


def _layer(source: _Source, layer: int, model: ModelConfig, moe: MoEConfig) -> dict[str, Tensor]:
    theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
    kind = "moe" if moe.is_moe_layer(layer) else "mlp"
    result = {
        f"{ours}.attention.norm": source.take(f"{theirs}.input_layernorm.weight"),
        f"{ours}.attention.qkv": _qkv(source, f"{theirs}.self_attn", model),
        f"{ours}.attention.output": source.take(f"{theirs}.self_attn.o_proj.weight"),
        f"{ours}.{kind}.norm": source.take(f"{theirs}.post_attention_layernorm.weight"),
    }
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            result[f"{ours}.attention.{name}"] = source.take(f"{theirs}.self_attn.{name}.weight")
    if kind == "moe":
        return result | _experts(source, theirs, f"{ours}.moe", moe)
    gate, up = (source.take(f"{theirs}.mlp.{name}_proj.weight") for name in ("gate", "up"))
    result[f"{ours}.mlp.gate_up"] = torch.stack((gate, up))
    result[f"{ours}.mlp.down"] = source.take(f"{theirs}.mlp.down_proj.weight")
    return result


def _qkv(source: _Source, prefix: str, model: ModelConfig) -> Tensor:
    """Join the projections: for each key head, its query heads, the key and the value."""
    parts = [source.take(f"{prefix}.{name}_proj.weight") for name in "qkv"]
    groups = filled(model.num_kv_heads)
    return torch.cat([part.reshape(groups, -1, model.hidden_size) for part in parts], dim=1)


def _experts(source: _Source, layer: str, ours: str, moe: MoEConfig) -> dict[str, Tensor]:
    prefix = f"{layer}.mlp"
    names = ("gate_proj", "up_proj", "down_proj")
    if source.has(f"{layer}.block_sparse_moe.gate.weight"):  # Mixtral on the hub
        prefix, names = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
    router = source.take(f"{prefix}.gate.weight")
    if source.has(f"{prefix}.experts.gate_up_proj"):
        fc1 = source.take(f"{prefix}.experts.gate_up_proj")
        fc1 = fc1.reshape(moe.num_experts, 2, -1, fc1.shape[-1])
        fc2 = source.take(f"{prefix}.experts.down_proj")
    else:
        gate, up, fc2 = (
            torch.stack(
                [source.take(f"{prefix}.experts.{e}.{name}.weight") for e in range(moe.num_experts)]
            )
            for name in names
        )
        fc1 = torch.stack((gate, up), dim=1)
    return {f"{ours}.router": router, f"{ours}.experts.fc1": fc1, f"{ours}.experts.fc2": fc2}


def _check_tied(embedding: Tensor, head: Tensor) -> None:
    # Folders often have both although they are equal; `transformers` unties differing ones.
    common = torch.promote_types(embedding.dtype, head.dtype)
    if not torch.equal(embedding.to(common), head.to(common)):
        raise MegacoreError(
            f"tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}; to keep both, set "
            f"it to false in config.json, else remove {HEAD} from the files"
        )


def _padded(weight: Tensor, model: ModelConfig) -> Tensor:
    """Pad a matrix with zero rows to the padded vocabulary."""
    missing = model.padded_vocab_size - weight.shape[0]
    return torch.nn.functional.pad(weight, (0, 0, 0, missing))


class _Source:
    """Tensors by name, each taken once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._left = set(tensors)

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> Tensor:
        if name not in self._left:
            raise MegacoreError(
                f"there is no tensor {name}; the folder holds another kind of model"
            )
        self._left.remove(name)
        return self._tensors[name]

    def check_empty(self) -> None:
        # Older folders contain rotation frequencies, which follow from the configuration.
        left = sorted(name for name in self._left if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise MegacoreError(
                f"{len(left)} tensors have no place in the model, such as {left[0]}; it has a part "
                "that megacore lacks"
            )
