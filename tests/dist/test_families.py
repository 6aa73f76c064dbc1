"""Every family trains as in `transformers`: twenty steps of an imported model, in any layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.optim.lr import learning_rate
from megatrain.cli import main
from megatrain.config import ResolvedConfig, load_config, resolve
from megatrain.train.initial_weights import load_initial_weights
from megatrain.train.trainer import build_trainer
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks
from tests.support.hf_models import FIRST, MODELS, save_bailing, save_theirs
from tests.unit.models.test_hf_mtp import make_folder as save_with_predictions

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
        "train": {"recompute": ["selective"]},
    },
}
CASES = {
    f"{family} | {layout}": (family, layout)
    for family in MODELS
    for layout in LAYOUTS
    if layout not in ("ep2", "etp2")
    or any("experts" in key and value for key, value in MODELS[family][1].items())
}
REPRESENTATIVES = [
    case
    for case, (family, layout) in CASES.items()
    # Of variants, the layouts that split what they add.
    if (layout == "one process" and family in FIRST and "," not in family)
    or (family, layout)
    in {
        ("qwen2, yarn, windows of some layers", "tp2 cp2 sequence parallel, recomputed"),
        ("qwen2-moe", "ep2"),
        ("llama, linear, biases", "tp2"),
        ("glm4-moe, groups, qk norm, biases", "pp2"),
        ("gpt-oss", "etp2"),
    }
]


def make_config(folder: Path, world_size: int, changes: dict[str, Any]) -> ResolvedConfig:
    """The configuration that the import wrote, with what a user gives on the command line."""
    settings = {"data.source": "python-docs", "train.steps": STEPS, "optimizer.lr": LR}
    settings |= {"train.global_batch_size": 8, "train.microbatch_size": 2, "train.eval_interval": 0}
    for section, values in changes.items():
        settings |= {f"{section}.{name}": value for name, value in values.items()}
    overrides = [
        (key, str(value).lower() if isinstance(value, bool) else str(value))
        for key, value in settings.items()
    ]
    return resolve(load_config(folder / "ours" / "config.toml", overrides), world_size, cuda=False)


def train(_rank: int, world_size: int, folder: Path, changes: dict[str, Any]) -> list[float]:
    config = make_config(folder, world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    assert config.checkpoint.load_weights is not None
    assert load_initial_weights(trainer, config.checkpoint.load_weights) == ()
    return [trainer.train_step(step).loss for step in range(config.train.steps)]


def import_model(family: str, folder: Path, **more: Any) -> Any:
    """Save a model of theirs and import it by the command; returns theirs."""
    theirs = save_theirs(family, folder / "theirs", **more)
    command = ["import-hf", str(folder / "theirs"), str(folder / "ours"), "--seq-length=16"]
    assert main(command) == 0
    return theirs.train()


@cache
def their_losses(family: str, folder: Path) -> list[float]:
    return train_theirs(import_model(family, folder), make_config(folder, 1, {}))


def train_theirs(theirs: Any, config: ResolvedConfig) -> list[float]:
    """Train with torch's AdamW on the batches of one process, with the settings of the run."""
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    batches = trainer._batches(trainer.data.train)
    settings = config.optimizer
    plain = [p for name, p in theirs.named_parameters() if not _is_decayed(name)]
    decayed = [p for name, p in theirs.named_parameters() if _is_decayed(name)]
    optimizer = torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": decayed}],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    losses = []
    for step in range(config.train.steps):
        parts: list[Tensor] = []
        for number in range(config.num_microbatches(1)):
            batch = batches(step, number)
            assert batch.labels is not None
            output = theirs(input_ids=batch.tokens, use_cache=False)
            loss = torch.nn.functional.cross_entropy(
                output.logits.flatten(0, 1), batch.labels.flatten()
            )
            parts.append(loss.detach())
            if (router_loss := getattr(output, "aux_loss", None)) is not None:
                loss = loss + theirs.config.router_aux_loss_coef * router_loss
            (loss / config.num_microbatches(1)).backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step, options=settings.rate_options(), total=config.train.steps
            )
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), settings.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts).mean().item())
    return losses


def _is_decayed(name: str) -> bool:
    return not any(part in name for part in ("norm", "bias", "sinks", "ln_"))


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
        found = run_ranks(world_size, train, world_size, folder, LAYOUTS[layout], timeout_s=180)
        losses = found[0]
    assert losses[:3] == pytest.approx(expected[:3], rel=1e-5)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0] - 0.3, "the model must have learnt something"


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "qwen2-moe", "gpt-oss"])
def test_router_losses_are_added_if_the_model_asks_for_them(family: str, tmp_path: Path) -> None:
    # With one layer, theirs, which pools layers, equals ours.
    more = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_hidden_layers": 1}
    more |= {"layer_types": None, "mlp_only_layers": []}
    theirs = import_model(family, tmp_path, **more)
    settings = {"train": {"steps": 5}}
    config = make_config(tmp_path, 1, settings)
    assert config.moe.aux_loss_coef == 0.5 * config.moe.top_k
    expected = train_theirs(theirs, config)
    assert train(0, 1, tmp_path, settings) == pytest.approx(expected, rel=1e-5)
    off = {**settings, "moe": {"aux_loss_coef": 0.0}}
    assert train(0, 1, tmp_path, off) != pytest.approx(expected, rel=1e-4)


def test_layers_for_multi_token_prediction_do_not_change_the_losses(tmp_path: Path) -> None:
    theirs, _ = save_with_predictions("deepseek-v3", tmp_path / "theirs")
    command = ["import-hf", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--seq-length=16"]
    assert main(command) == 0
    settings = {"train": {"steps": 5}}
    config = make_config(tmp_path, 1, settings)
    assert config.model.num_mtp_layers == 1
    expected = train_theirs(theirs.train(), config)
    assert train(0, 1, tmp_path, settings) == pytest.approx(expected, rel=1e-5)
    trained = {**settings, "model": {"mtp_loss_coef": 0.1}}
    assert train(0, 1, tmp_path, trained) != pytest.approx(expected, rel=1e-4)


def test_the_losses_of_ling_are_those_of_its_parts(tmp_path: Path) -> None:
    theirs = save_bailing(tmp_path / "theirs")
    command = ["import-hf", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--seq-length=16"]
    assert main(command) == 0
    expected = train_theirs(theirs.train(), make_config(tmp_path, 1, {}))
    losses = train(0, 1, tmp_path, {})
    assert losses[:3] == pytest.approx(expected[:3], rel=1e-5)
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["olmo2", "qwen2"])
def test_the_row_of_the_padding_token_matters(family: str, tmp_path: Path) -> None:
    expected = train_theirs(import_model(family, tmp_path), make_config(tmp_path, 1, {}))
    losses = train(0, 1, tmp_path, {"model": {"padding_idx": "none"}})
    assert losses != pytest.approx(expected, rel=1e-4)
