"""Low-rank adapters train as those of PEFT, in every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.optim.lr import learning_rate
from megacore.parallel.params import ShardPosition, shard
from megatrain.cli import main
from megatrain.config import ResolvedConfig
from megatrain.train.initial_weights import load_initial_weights
from megatrain.train.trainer import Trainer, build_trainer
from tests.dist import test_families as families
from tests.support.adapters import (
    ALPHA,
    RANK,
    add_adapters,
    add_plain_experts,
    formula,
    in_our_order,
    their_adapters,
    their_saved,
)
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks
from tests.support.hf_models import make_theirs, save_theirs

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

LORA: dict[str, Any] = {"rank": RANK, "alpha": ALPHA}
OPTIMIZER = {"lr": 0.02}
# PEFT has one adapter for gate and up of experts.
AS_PEFT = {
    "llama": ["*"],
    "qwen3-moe": ["attention.*", "experts.down"],
    "deepseek-v3": ["attention.*", "mlp.*", "shared.*", "experts.down"],
}
# Settings of PEFT, and changes of ours.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {}),
    "rs": ({"use_rslora": True}, {"lora": {**LORA, "rs": True}}),
    "dora": (
        {"use_dora": True},
        {"lora": {**LORA, "dora": True}, "optimizer": {**OPTIMIZER, "weight_decay": 0.0}},
    ),
    "some": (
        {"target_modules": ["q_proj", "v_proj", "up_proj"]},
        {"lora": {**LORA, "targets": ["q", "v", "up"]}},
    ),
    "saved": (
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"lora": {**LORA, "modules_to_save": ["embedding", "head"]}},
    ),
}
EXPERTS = {**LORA, "targets": ["experts.*"]}


def make_trainer(folder: Path, world_size: int, changes: dict[str, Any]) -> Trainer:
    """A trainer of the imported model with the adapters of `formula`."""
    config = families.make_config(
        folder, world_size, {"lora": LORA, "optimizer": OPTIMIZER, **changes}
    )
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    load_initial_weights(trainer, config.checkpoint.load_weights)
    for buffer in trainer.optimizer.buffers:
        for info, parameter in buffer.params:
            if info.name.rpartition(".")[2] not in ("lora_a", "lora_b"):
                continue  # norms of weights, or weights
            whole = formula(info.name, info.full_shape)
            whole = in_our_order(info.name, whole, model_type(folder), config.model)
            position = ShardPosition.of(info, trainer.groups)
            with torch.no_grad():
                parameter.copy_(shard(whole, info, **vars(position)))
    trainer.optimizer.finish_load(0)
    return trainer


def model_type(folder: Path) -> str:
    import json

    return json.loads((folder / "theirs" / "config.json").read_text())["model_type"]


Result = tuple[list[float], dict[str, tuple[Any, ShardPosition, Tensor]]]


def train(_rank: int, world_size: int, folder: Path, changes: dict[str, Any]) -> Result:
    """Losses, and this rank's parts of the adapters after the last step."""
    trainer = make_trainer(folder, world_size, changes)
    losses = [trainer.train_step(step).loss for step in range(trainer.config.train.steps)]
    trainer.optimizer.finish_param_gather()
    return losses, {
        info.name: (info, ShardPosition.of(info, trainer.groups), parameter.detach().clone())
        for buffer in trainer.optimizer.buffers
        for info, parameter in buffer.params
    }


def results_of(world_size: int, changes: dict[str, Any], folder: Path) -> list[Result]:
    """Results of `train` on each rank."""
    if world_size == 1:
        return [train(0, 1, folder, changes)]
    return run_ranks(world_size, train, world_size, folder, changes, timeout_s=200)


def train_theirs(model: Any, config: ResolvedConfig) -> list[float]:
    """Train adapters with torch's AdamW on the batches of one process."""
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    batches, settings = trainer._batches(trainer.data.train), config.optimizer
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
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
            logits = model(input_ids=batch.tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
            parts.append(loss.detach())
            (loss / config.num_microbatches(1)).backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step, options=settings.rate_options(), total=config.train.steps
            )
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts).mean().item())
    return losses


Expected = tuple[list[float], dict[str, Tensor]]


@cache
def expected(family: str, folder: Path, kind: str = "lora") -> Expected:
    """Losses and final adapters of PEFT, with rows in our order."""
    theirs = save_theirs(family, folder / "theirs")
    if not (folder / "ours").exists():
        command = ["import-hf", str(folder / "theirs"), str(folder / "ours"), "--seq-length=16"]
        assert main(command) == 0
    settings, changes = KINDS[kind]
    optimizer = changes.get("optimizer", OPTIMIZER)
    config = families.make_config(folder, 1, {"optimizer": optimizer})
    model = add_adapters(theirs.train(), **settings)
    losses = train_theirs(model, config)
    adapters = {
        name: in_our_order(name, value.detach(), model_type(folder), config.model)
        for name, value in their_adapters(model).items()
    }
    return losses, adapters | their_saved(model, config.model.padded_vocab_size)


@cache
def expected_of_experts(family: str, folder: Path) -> Expected:
    """The same with adapters of all projections of experts alone, by plain torch."""
    expected(family, folder)  # which imports the model
    theirs = make_theirs(family).train()
    adapters = add_plain_experts(theirs)
    config = families.make_config(folder, 1, {"optimizer": OPTIMIZER})
    losses = train_theirs(theirs, config)
    return losses, {name: value.detach() for name, value in adapters.items()}


def check(result: Result, losses: list[float], adapters: dict[str, Tensor]) -> None:
    found, parts = result
    assert found == pytest.approx(losses, rel=1e-5)
    for name, (info, position, value) in parts.items():
        wanted = shard(adapters[name], info, **vars(position))
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4, msg=name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.mark.parametrize("family", AS_PEFT)
def test_twenty_steps_are_those_of_peft(family: str, folders: Path) -> None:
    folder = folders / family
    losses, adapters = expected(family, folder)
    assert losses[-1] < losses[0] - 0.2, "the model must have learnt something"
    result = train(0, 1, folder, {"lora": {**LORA, "targets": AS_PEFT[family]}})
    assert result[1].keys() == adapters.keys()
    check(result, losses, adapters)


SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"parallel": {"tp": 2}}),
    "tp2 sequence parallel": (2, {"parallel": SEQUENCE_PARALLEL}),
    "tp2 sequence parallel, recomputed": (
        2,
        {"parallel": SEQUENCE_PARALLEL, "train": {"recompute": ["full"]}},
    ),
    "recomputed parts": (1, {"train": {"recompute": ["selective", "mlp"]}}),
    "cp2": (2, {"parallel": {"cp": 2}}),
    "cp2 a2a": (2, {"parallel": {"cp": 2, "cp_comm": "a2a"}}),
    "dp2": (2, {}),
    "dp2, overlapped": (2, {"optimizer": {"overlap": "all", "bucket_numel": 2000, **OPTIMIZER}}),
    "dp2 without ZeRO-1": (2, {"optimizer": {"distributed": False, **OPTIMIZER}}),
    "pp2": (2, {"parallel": {"pp": 2}, "pipeline": {"layout": "Ett|tL"}}),
    "pp2 zb_h1": (
        2,
        {"parallel": {"pp": 2}, "pipeline": {"schedule": "zb_h1", "layout": "Ett|tL"}},
    ),
    "one rank, split backwards": (
        1,
        {"pipeline": {"schedule": "interleaved_zb", "num_chunks": 3}},
    ),
    "graphs of layers": (1, {"graphs": {"mode": "partial", "warmup_steps": 1}}),
    "graphs of steps": (1, {"graphs": {"mode": "full_step", "warmup_steps": 1}}),
    "tp2 cp2 sequence parallel, recomputed": (
        4,
        {"parallel": {"cp": 2, **SEQUENCE_PARALLEL}, "train": {"recompute": ["selective"]}},
    ),
    "tp2 pp2 sequence parallel": (
        4,
        {"parallel": {"pp": 2, **SEQUENCE_PARALLEL}, "pipeline": {"layout": "Ett|tL"}},
    ),
}
FIRST = [
    "tp2",
    "tp2 sequence parallel",
    "recomputed parts",
    "cp2",
    "dp2, overlapped",
    "pp2 zb_h1",
    "graphs of steps",
]


@pytest.mark.parametrize("layout", representatives(LAYOUTS, FIRST))
def test_layouts_train_as_peft(layout: str, folders: Path) -> None:
    folder = folders / "llama"
    losses, adapters = expected("llama", folder)
    world_size, changes = LAYOUTS[layout]
    results = results_of(world_size, changes, folder)
    assert set().union(*(parts for _, parts in results)) == adapters.keys()
    for result in results:
        check(result, losses, adapters)


EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "recomputed": (1, {"train": {"recompute": ["moe"]}}),
    "ep2": (2, {"parallel": {"ep": 2}}),
    "tp2 etp2 sequence parallel": (2, {"parallel": {**SEQUENCE_PARALLEL, "etp": 2}}),
    "tp2 etp1 ep2": (2, {"parallel": {"tp": 2, "etp": 1, "ep": 2}}),
    "pp2 ep2": (4, {"parallel": {"pp": 2, "ep": 2}, "pipeline": {"layout": "Ett|tL"}}),
    "ep2 static": (2, {"parallel": {"ep": 2}, "moe": {"dispatcher": "static"}}),
    "ep2 allgather": (2, {"parallel": {"ep": 2}, "moe": {"dispatcher": "allgather"}}),
    "ep2, clones": (2, {"parallel": {"ep": 2}, "moe.echo": {"num_spare_slots": 2}}),
    "ep2 static, clones": (
        2,
        {
            "parallel": {"ep": 2},
            "moe": {"dispatcher": "static"},
            "moe.echo": {"num_spare_slots": 2},
        },
    ),
    "ep2, clones by messages, recomputed": (
        2,
        {
            "parallel": {"ep": 2},
            "moe.echo": {"num_spare_slots": 2},
            "run": {"host_memory": False},
            "train": {"recompute": ["full"]},
        },
    ),
    "pp2 ep2, clones, in pairs": (
        4,
        {
            "parallel": {"pp": 2, "ep": 2},
            "moe.echo": {"num_spare_slots": 2},
            "pipeline": {"overlap_moe": True, "layout": "Ett|tL"},
        },
    ),
}
FIRST_OF_EXPERTS = ["one process", "ep2, clones", "tp2 etp2 sequence parallel"]


@pytest.mark.parametrize("layout", representatives(EXPERT_LAYOUTS, FIRST_OF_EXPERTS))
def test_adapters_of_experts_train_as_plain_sums(layout: str, folders: Path) -> None:
    folder = folders / "qwen3-moe"
    losses, adapters = expected_of_experts("qwen3-moe", folder)
    world_size, changes = EXPERT_LAYOUTS[layout]
    changes = {"lora": EXPERTS, **changes}
    results = results_of(world_size, changes, folder)
    assert set().union(*(parts for _, parts in results)) == adapters.keys()
    for result in results:
        check(result, losses, adapters)


LATENT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **LAYOUTS,
    **EXPERT_LAYOUTS,
    "graphs of steps": (
        1,
        {
            "moe": {"dispatcher": "static"},
            "graphs": {"mode": "full_step", "warmup_steps": 1},
        },
    ),
    "ep2 static, clones, graphs of layers": (
        2,
        {
            "parallel": {"ep": 2},
            "moe": {"dispatcher": "static"},
            "moe.echo": {"num_spare_slots": 2},
            "graphs": {"mode": "partial", "warmup_steps": 1},
        },
    ),
    "tp2 etp1 cp2 ep4 sequence parallel, clones": (
        4,
        {
            "parallel": {"cp": 2, "ep": 4, "etp": 1, **SEQUENCE_PARALLEL},
            "moe.echo": {"num_spare_slots": 1},
        },
    ),
    "tp2 etp2 pp2 sequence parallel, recomputed": (
        4,
        {
            "parallel": {"pp": 2, "etp": 2, **SEQUENCE_PARALLEL},
            "pipeline": {"schedule": "zb_h1", "layout": "Ett|tL"},
            "train": {"recompute": ["full"]},
        },
    ),
}
del LATENT_LAYOUTS["one process"], LATENT_LAYOUTS["cp2 a2a"]  # the other one is refused
FIRST_OF_LATENT = ["tp2 etp2 sequence parallel", "cp2", "ep2, clones"]

# At the rate of the other tests, one process whose adapters start 1e-7 away ends 1e-5 away in its
# losses, and 2e-4 in its adapters, with dropout; at this one 5e-7 and 5e-5.
SMALLER = {"lr": 0.005}
LATENT_KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rs, dora": {"lora": {**LORA, "rs": True, "dora": True}, "optimizer": SMALLER},
    "dropout": {"lora": {**LORA, "dropout": 0.3}, "optimizer": SMALLER},
    "saved": {
        "lora": {**LORA, "modules_to_save": ["embedding", "head", "router", "*norm"]},
        "optimizer": SMALLER,
    },
}


@cache
def of_one_process(folder: Path, kind: str = "lora") -> Expected:
    """Losses and trained parameters of one process with adapters of all projections."""
    expected("deepseek-v3", folder)  # which imports the model
    losses, trained = train(0, 1, folder, LATENT_KINDS[kind])
    assert losses[-1] < losses[0] - 0.2, "the model must have learnt something"
    return losses, {name: value for name, (_, _, value) in trained.items()}


@pytest.mark.parametrize("layout", representatives(LATENT_LAYOUTS, FIRST_OF_LATENT))
def test_latent_attention_and_all_experts_train_as_one_process(layout: str, folders: Path) -> None:
    folder = folders / "deepseek-v3"
    losses, adapters = of_one_process(folder)
    kinds = {name.split(".", 2)[2].rpartition(".")[0] for name in adapters}
    assert {"attention.kv_down", "mlp.gate", "moe.shared.up", "moe.experts.gate"} < kinds
    for result in results_of(*LATENT_LAYOUTS[layout], folder):
        check(result, losses, adapters)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", [kind for kind in LATENT_KINDS if kind != "lora"])
@pytest.mark.parametrize(
    "layout",
    [
        "tp2",
        "tp2 sequence parallel, recomputed",
        "pp2 zb_h1",
        "tp2 etp2 sequence parallel",
        "tp2 etp1 ep2",
        "ep2, clones",
        "graphs of layers",
    ],
)
def test_kinds_of_adapters_of_latent_attention(kind: str, layout: str, folders: Path) -> None:
    folder = folders / "deepseek-v3"
    losses, trained = of_one_process(folder, kind)
    plain_losses, plain = of_one_process(folder)
    assert trained.keys() > plain.keys() or losses[0] != pytest.approx(plain_losses[0], rel=1e-4)
    world_size, changes = LATENT_LAYOUTS[layout]
    results = results_of(world_size, {**LATENT_KINDS[kind], **changes}, folder)
    assert set().union(*(parts for _, parts in results)) == trained.keys()
    for result in results:
        check(result, losses, trained)


OF_KINDS = ["one process", "tp2", "tp2 sequence parallel", "pp2 zb_h1", "tp2 pp2 sequence parallel"]
KIND_LAYOUTS = [(kind, layout) for kind in KINDS for layout in OF_KINDS if kind != "lora"]
FIRST_OF_KINDS = [(kind, "one process") for kind in KINDS if kind != "lora"]


@pytest.mark.parametrize(
    ("kind", "layout"),
    representatives(
        KIND_LAYOUTS,
        [*FIRST_OF_KINDS, ("dora", "tp2 sequence parallel"), ("saved", "tp2 sequence parallel")],
    ),
)
def test_kinds_of_adapters_train_as_those_of_peft(kind: str, layout: str, folders: Path) -> None:
    folder = folders / "llama"
    losses, adapters = expected("llama", folder, kind)
    assert losses != pytest.approx(expected("llama", folder)[0], rel=1e-4)
    world_size, changes = {"one process": (1, {}), **LAYOUTS}[layout]
    results = results_of(world_size, {**KINDS[kind][1], **changes}, folder)
    assert set().union(*(parts for _, parts in results)) == adapters.keys()
    for result in results:
        check(result, losses, adapters)


DROPOUT = {**LORA, "dropout": 0.3}
DROPOUT_LAYOUTS = {
    "tp2": LAYOUTS["tp2"],
    "tp2 sequence parallel, recomputed": LAYOUTS["tp2 sequence parallel, recomputed"],
    "recomputed parts": LAYOUTS["recomputed parts"],
    "cp2": LAYOUTS["cp2"],
    "pp2 zb_h1": LAYOUTS["pp2 zb_h1"],
    "graphs of layers": LAYOUTS["graphs of layers"],
    "graphs of steps": LAYOUTS["graphs of steps"],
}


@cache
def dropped(folder: Path) -> list[float]:
    """Losses of one process with dropout."""
    expected("llama", folder)
    return train(0, 1, folder, {"lora": DROPOUT})[0]


@pytest.mark.parametrize("layout", representatives(DROPOUT_LAYOUTS, ["tp2", "graphs of steps"]))
def test_dropout_is_the_same_in_every_layout(layout: str, folders: Path) -> None:
    folder = folders / "llama"
    losses = dropped(folder)
    assert losses != pytest.approx(expected("llama", folder)[0], rel=1e-4)
    world_size, changes = DROPOUT_LAYOUTS[layout]
    changes = {"lora": DROPOUT, **changes}
    results = results_of(world_size, changes, folder)
    for found, _ in results:
        assert found == pytest.approx(losses, rel=1e-5)
