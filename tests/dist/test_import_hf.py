"""Weights from a folder of Hugging Face, split over real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.batch import Microbatch
from megatrain.hf import import_hf
from tests.support.distributed import run_ranks

CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 40,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-5,
}


def write_folder(folder: Path) -> None:
    """As on the hub: one tensor per expert, in two files."""
    shapes = {"model.embed_tokens": (40, 16), "lm_head": (40, 16), "model.norm": (16,)}
    for layer in (f"model.layers.{index}" for index in range(2)):
        shapes |= {f"{layer}.{name}_layernorm": (16,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (16, 16) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (8, 16) for name in "kv"}
        shapes[f"{layer}.block_sparse_moe.gate"] = (4, 16)
        for expert in (f"{layer}.block_sparse_moe.experts.{index}" for index in range(4)):
            shapes |= {f"{expert}.w1": (12, 16), f"{expert}.w3": (12, 16), f"{expert}.w2": (16, 12)}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:20]}, folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[20:]}, folder / "model-2.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def loss_of(_rank: int, folder: Path, sizes: dict[str, int]) -> float:
    groups = ProcessGroups.create(Topology(**sizes))
    chunk = import_hf(folder, groups=groups).chunk
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = Microbatch(
        tokens=tokens[:, :-1], labels=tokens[:, 1:], sample_ids=torch.arange(2), step=0
    )
    return chunk(None, batch).item()


@pytest.mark.dist
def test_every_rank_gets_its_part(tmp_path: Path) -> None:
    write_folder(tmp_path)
    whole = loss_of(0, tmp_path, {"world_size": 1})
    for sizes in (
        {"world_size": 2, "tp": 2, "etp": 1, "ep": 2},
        {"world_size": 4, "tp": 2, "ep": 2},
    ):
        losses = run_ranks(sizes["world_size"], loss_of, tmp_path, sizes)
        assert losses == pytest.approx([whole] * len(losses), rel=1e-5)
