"""Every family trains as in `transformers`: twenty steps from the same weights, in any layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config import Config, resolve
from megacore.models.hf import sections_from_hf
from megacore.models.hf.files import read_config
from megacore.train.initial_weights import load_initial_weights
from megacore.train.trainer import build_trainer
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks
from tests.support.hf_models import MODELS, save_theirs

STEPS, LR = 20, 3e-3
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp2": {"parallel": {"tp": 2, "sequence_parallel": False}},
    "tp2 sequence parallel": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "cp2": {"parallel": {"cp": 2}},
    "pp2": {
        "parallel": {"pp": 2},
        "pipeline": {"schedule": "zb_h1", "layout": "Ett|tL"},
    },
    "ep2": {"parallel": {"ep": 2}},
    "etp2": {"parallel": {"tp": 2, "etp": 2, "sequence_parallel": True}},
    "tp2 cp2 sequence parallel, recomputed": {
        "parallel": {"tp": 2, "cp": 2, "sequence_parallel": True},
        "train": {"recompute": "selective"},
    },
}
CASES = {
    f"{family} | {layout}": (family, layout)
    for family in MODELS
    for layout in LAYOUTS
    if layout not in ("ep2", "etp2") or any("experts" in key for key in MODELS[family][1])
}
REPRESENTATIVES = [
    case
    for case, (family, layout) in CASES.items()
    # Of variants, the layouts that split what they add.
    if (layout == "one process" and "," not in family and not family.endswith(" tied"))
    or (family, layout)
    in {
        ("qwen2, yarn, windows of some layers", "tp2 cp2 sequence parallel, recomputed"),
        ("qwen2-moe", "ep2"),
        ("llama, linear, biases", "tp2"),
        ("glm4-moe, groups, qk norm, biases", "pp2"),
        ("gpt-oss", "etp2"),
    }
]


def make_config(folder: Path, world_size: int, changes: dict[str, Any]) -> Config:
    model, moe = sections_from_hf(read_config(folder), seq_length=16)
    sections: dict[str, Any] = {
        "model": model.model_dump(),
        # Their load-balancing loss is off, and their biases of experts are constant.
        "moe": {**moe.model_dump(), "aux_loss_coef": 0.0, "expert_bias": moe.expert_bias and 0.0},
        "optimizer": {
            "lr": LR,
            "schedule": "constant",
            "warmup_steps": 0,
            "weight_decay": 0.0,
            "clip_grad": 0.0,
        },
        "train": {"steps": STEPS, "global_batch_size": 8, "microbatch_size": 2, "eval_interval": 0},
    }
    for name, section in changes.items():
        sections[name] = {**sections.get(name, {}), **section}
    return resolve(Config(**sections), world_size, vocab_size=256, cuda=False)


def train(_rank: int, world_size: int, folder: Path, changes: dict[str, Any]) -> list[float]:
    config = make_config(folder, world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    assert load_initial_weights(trainer, folder) == ()
    return [trainer.train_step(step).loss for step in range(STEPS)]


@cache
def their_losses(family: str, folder: Path) -> list[float]:
    """Save a model, then train it with torch's AdamW on the batches of one process."""
    theirs = save_theirs(family, folder).train()
    config = make_config(folder, 1, {})
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    batches = trainer._batches(trainer.data.train)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        theirs.parameters(),
        lr=LR,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=0.0,
    )
    losses = []
    for step in range(STEPS):
        parts: list[Tensor] = []
        for number in range(config.num_microbatches(1)):
            batch = batches(step, number)
            assert batch.labels is not None
            logits = theirs(input_ids=batch.tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
            (loss / config.num_microbatches(1)).backward()
            parts.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts).mean().item())
    return losses


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.dist
@pytest.mark.parametrize("case", representatives(CASES, REPRESENTATIVES))
def test_losses_are_those_of_transformers(case: str, folders: Path) -> None:
    family, layout = CASES[case]
    folder = folders / family.replace(" ", "_")
    expected = their_losses(family, folder)
    parallel = LAYOUTS[layout].get("parallel", {})
    world_size = max(1, parallel.get("tp", 1) * parallel.get("cp", 1) * parallel.get("pp", 1))
    world_size = max(world_size, parallel.get("ep", 1))
    if world_size == 1:
        losses = train(0, 1, folder, {})
    else:
        losses = run_ranks(world_size, train, world_size, folder, LAYOUTS[layout])[0]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0] - 0.3, "the model must have learnt something"
