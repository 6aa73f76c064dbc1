"""Training steps of the contestants of ``bench_peers.py``: one function makes one step.

Each maker takes a :class:`Shape` and returns ``step(number)``, which trains on the batch of that
number with AdamW and clipped gradients. Imports are inside of the makers: megacore and its peers
have environments of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

Step = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT with SwiGLU, rotary positions and untied embeddings, and its batch."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    ffn: int = 704
    vocab: int = 256
    tokens: int = 256
    samples: int = 4
    experts: int = 0  # of width ffn, two per token; 0: a dense model
    dtype: str = "float32"  # of activations; peers have weights and optimizer in it too


def megacore(shape: Shape) -> Step:
    """The trainer of megacore."""
    import torch

    from megatrain.config import Config, resolve
    from megatrain.launch.worker import keep_freed_memory
    from megatrain.train.trainer import build_trainer

    keep_freed_memory()  # as `megacore train` does
    sections: dict[str, Any] = {
        "model": {
            "hidden_size": shape.hidden,
            "num_layers": shape.layers,
            "num_heads": shape.heads,
            "num_kv_heads": shape.heads,
            "ffn_hidden_size": shape.ffn,
            "seq_length": shape.tokens,
            "tie_embeddings": False,
        },
        "train": {
            "microbatch_size": shape.samples,
            "global_batch_size": shape.samples,
            "eval_interval": 0,
            "dtype": shape.dtype,
        },
    }
    if shape.experts:
        sections["moe"] = {
            "num_experts": shape.experts,
            "top_k": 2,
            "ffn_hidden_size": shape.ffn,
        }
    config = resolve(Config(**sections), 1, vocab_size=shape.vocab, cuda=False)
    return build_trainer(config, world_size=1, device=torch.device("cpu")).train_step


def megacore_float32(shape: Shape) -> Step:
    """The trainer of megacore in float32, whatever the others have."""
    return megacore(replace(shape, dtype="float32"))


def transformers(shape: Shape) -> Step:
    """Llama, or Mixtral for a model with experts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
    }
    model: torch.nn.Module
    if shape.experts:
        config = MixtralConfig(
            **sizes,
            num_local_experts=shape.experts,
            num_experts_per_tok=2,
            output_router_logits=True,
        )
        config._experts_implementation = "grouped_mm"
        model = MixtralForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    return _trained(model, lambda ids: model(input_ids=ids, labels=ids).loss, shape)


def transformers_compiled(shape: Shape) -> Step:
    """``transformers`` with its forward and backward passes compiled by torch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            intermediate_size=shape.ffn,
            vocab_size=shape.vocab,
            use_cache=False,
        )
    )
    compiled: Any = torch.compile(model)
    return _trained(model, lambda ids: compiled(input_ids=ids, labels=ids).loss, shape)


def plain(shape: Shape) -> Step:
    """The model as it is written by hand with operations of torch."""
    model = _plain_model(shape)
    return _trained(model, model, shape)


def plain_compiled(shape: Shape) -> Step:
    """The hand-written model, compiled by torch."""
    import torch

    model = _plain_model(shape)
    compiled: Any = torch.compile(model)
    return _trained(model, compiled, shape)


def megatron(shape: Shape) -> Step:
    """Megatron-Core's GPT of local layers, with fused AdamW of torch, as one process."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", store=dist.FileStore(file.name, 1), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    # It asks CUDA for a device and for random states, which a model without dropout never reads.
    tensor_parallel.get_cuda_rng_tracker = _NoRandomStates  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=shape.vocab,
        max_sequence_length=shape.tokens,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    positions = torch.arange(shape.tokens - 1).expand(shape.samples, -1)
    masked = torch.triu(torch.ones(1, 1, shape.tokens - 1, shape.tokens - 1, dtype=torch.bool), 1)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(ids[:, :-1], positions, masked, labels=ids[:, 1:]).mean()
        return loss

    return _trained(model, loss_of, shape)


STEPS: dict[str, Callable[[Shape], Step]] = {
    "megacore": megacore,
    "transformers": transformers,
    "transformers compiled": transformers_compiled,
    "plain torch": plain,
    "plain torch compiled": plain_compiled,
    "Megatron-Core": megatron,
    "megacore float32": megacore_float32,
}
DENSE = tuple(name for name in STEPS if name != "megacore float32")
NARROW = ("megacore", "megacore float32", "transformers")


class _NoRandomStates:
    """A tracker of random states that has none, for models without dropout."""

    def fork(self, *_: object) -> nullcontext[None]:
        return nullcontext()


def _trained(model: Any, loss_of: Callable[[Any], Any], shape: Shape) -> Step:
    import torch

    model.to(getattr(torch, shape.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        size = (shape.samples, shape.tokens)
        ids = torch.randint(0, shape.vocab, size, generator=generator)
        optimizer.zero_grad()
        loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return step


def _plain_model(shape: Shape) -> Any:
    """Return a module that maps token numbers ``(samples, tokens)`` to their loss."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    head_size = shape.hidden // shape.heads
    angles = torch.outer(
        torch.arange(shape.tokens).float(),
        10000.0 ** (-torch.arange(0, head_size, 2).float() / head_size),
    )
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
            self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
            self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
            self.fc1 = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
            self.fc2 = nn.Linear(shape.ffn, shape.hidden, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.qkv(self.norm1(x)).unflatten(-1, (3, shape.heads, head_size))
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            gate, up = self.fc1(self.norm2(x)).chunk(2, dim=-1)
            return x + self.fc2(F.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(shape.vocab, shape.hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.hidden)
            self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return Model()
