"""Every setting changes something, is noted as without effect, is refused, or promises the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from megacore.errors import ConfigError
from megatrain.checkpoint import load_full_weights
from megatrain.config import Config, ResolvedConfig, resolve, section_classes
from megatrain.config.base import split_key
from megatrain.config.unused import UNUSED_RULES
from megatrain.train.loop import train
from tests.support.campaigns import representatives
from tests.support.configs import rank_context

BASE = MappingProxyType(
    {
        "model.hidden_size": 32,
        "model.num_layers": 2,
        "model.num_heads": 4,
        "model.seq_length": 16,
        "model.ffn_hidden_size": 64,
        "train.steps": 4,
        "train.microbatch_size": 1,
        "train.global_batch_size": 2,
        "train.eval_interval": 2,
        "train.eval_steps": 1,
        "checkpoint.interval": 0,
        "run.plain": True,
        "debug.trace_step": -1,
    }
)
BASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"moe.num_experts": 4},
    "muon": {"optimizer.name": "muon"},
    "lora": {"lora.rank": 4},
}
# Settings of bases that others do not use.
OF_BASES = {"muon": "optimizer.", "lora": "lora."}
# Another value of settings that are not switches or choices. None: tested elsewhere.
OTHERS: dict[str, Any] = {
    **dict.fromkeys(("model.factory", "model.options", "train.loss", "train.callbacks")),
    **dict.fromkeys(("data.factory", "data.tokenizer", "data.sources", "data.validation")),
    **dict.fromkeys(("data.order", "data.cache", "checkpoint.dir", "checkpoint.load_weights")),
    **dict.fromkeys(("run.dir", "run.writers", "run.calibration", "run.plain")),
    **dict.fromkeys(("debug.record_routing", "debug.replay_routing", "pipeline.layout")),
    **dict.fromkeys(("model.rope_scaling.short_factors", "model.rope_scaling.long_factors")),
    **dict.fromkeys(("pipeline.schedule_file", "data.bos", "data.eod", "data.separator")),
    **dict.fromkeys(("preference.loss", "preference.reference_dir")),
    "preference.label_smoothing": 0.25,
    "data.source": "stdlib",
    "data.split": "50,50",
    "data.field": "other",
    "parallel.order": "tp-cp-dp-ep-pp",
    "moe.layer_pattern": "de",
    "model.window_pattern": "wf",
    "model.rotation_pattern": "rn",
    "model.mla.index_pattern": "fs",
    "model.learned_positions": 256,
    "model.dropout": 0.2,
    "model.rotary_fraction": 0.5,
    "model.num_kv_heads": 2,
    "model.num_heads": 2,
    "model.padding_idx": ord(" "),
    "model.head_dim": 16,
    "model.vocab_size": 300,
    "model.hidden_size": 48,
    "model.rope_scaling.factor": 2.0,
    "model.mla.kv_rank": 16,
    "moe.top_k": 1,
    "moe.expert_bias": True,
    "moe.static_budget": 1.0,
    "moe.capacity_factor": 0.5,
    "moe.jitter": 0.3,
    "moe.num_groups": 2,
    "moe.groups_top_k": 2,
    "optimizer.factory": "torch.optim:RMSprop",
    "optimizer.distributed": False,
    "optimizer.min_lr": 1e-3,
    "optimizer.decay_end": 3,
    "optimizer.warmup_from": 1e-3,
    "optimizer.beta1": 0.5,
    "optimizer.ema_decay": 0.5,
    "optimizer.groups": [{"pattern": "layers.0.*", "optimizer": "none"}],
    "optimizer.beta2": 0.5,
    "optimizer.momentum": 0.5,
    "optimizer.muon.adamw_lr": 1e-3,
    "optimizer.muon.momentum": 0.5,
    "optimizer.muon.num_iterations": 3,
    "optimizer.clip_grad": 0.01,
    "train.recompute": ["full"],
    "graphs.mode": "full",
    "graphs.scopes": ["mlp"],
    "checkpoint.interval": 1,
    "checkpoint.resume": "auto",
    "run.timeout_s": 100.0,
    "run.stop_after": "1h",
    "run.nproc": 1,
    "run.torch_operations": ["rms_norm"],
    "debug.trace_step": 2,
    "debug.profile_steps": "2",
    "debug.load_interval": 1,
    "optimizer.loss_scale": 1024.0,
    "lora.rank": 3,
    "lora.dropout": 0.5,
    "lora.targets": ["q"],
    "lora.modules_to_save": ["embedding"],
}
# Settings of speed, memory, communication and failures, or for several ranks: the same results.
# The last line has conditions that the data or the run decide.
SAME_RESULTS = frozenset(
    {
        *("model.vocab_pad_multiple", "parallel.order", "parallel.cp_comm", "pipeline.schedule"),
        *("parallel.sequence_parallel", "pipeline.overlap_p2p", "moe.dispatcher"),
        *("optimizer.num_instances", "optimizer.overlap", "train.recompute", "graphs.mode"),
        *("optimizer.distributed", "graphs.scopes", "optimizer.ema_decay"),
        *("run.nproc", "run.timeout_s", "run.stop_after", "checkpoint.on_failure"),
        *("run.kernels", "run.torch_operations"),
        *("optimizer.bucket_numel", "optimizer.pad_for_ring", "optimizer.average_in_collective"),
        *("debug.check_messages", "run.backend", "run.host_memory", "run.peer_timeout_s"),
        *("checkpoint.async", "checkpoint.keep", "train.max_skipped_steps"),
        *("data.field", "data.document_mask", "train.loss_normalization", "checkpoint.resume"),
    }
)


def _choices(annotation: Any) -> Iterator[Any]:
    if annotation is bool:
        yield from (True, False)
    for part in get_args(annotation):
        if isinstance(part, str | bool):
            yield part
        else:
            yield from _choices(part)


def _other_values(key: str, default: Any, annotation: Any) -> list[Any]:
    if key in OTHERS:
        return [] if OTHERS[key] is None else [OTHERS[key]]
    if choices := [value for value in _choices(annotation) if value != default]:
        return choices
    return [2 if default in (None, 0, 1) else default * 2]


CASES = [
    (base, key, value)
    for section, cls in section_classes().items()
    for key, info in ((f"{section}.{name}", info) for name, info in cls.by_key().items())
    for value in _other_values(key, BASE.get(key, info.default), info.annotation)
    for base in BASES
    if key.startswith(OF_BASES.get(base, "")) and value != base
]


def _is_legal(key: str, value: Any) -> bool:
    section, name = split_key(key)
    info = section_classes()[section].by_key()[name]
    annotation: Any = info.annotation
    for rule in info.metadata:
        annotation = Annotated[annotation, rule]
    try:
        TypeAdapter[Any](annotation).validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("key", sorted({key for _, key, _ in CASES}))
def test_a_setting_is_tried_with_a_legal_value(key: str) -> None:
    values = [value for _, other, value in CASES if other == key]
    assert all(_is_legal(key, value) for value in values), (
        f"{values} are not values of {key}: give it another one in OTHERS of {__file__}"
    )


KEPT = [
    ("dense", "moe.top_k", 1),
    ("experts", "moe.top_k", 1),
    ("dense", "model.mla.v_head_dim", 256),
    ("dense", "optimizer.min_lr", 1e-3),
    ("experts", "moe.aux_loss_type", "batch"),
    ("lora", "lora.init", "gaussian"),
]


def _config(folder: Path, changes: dict[str, Any], name: str = "run") -> ResolvedConfig:
    sections: dict[str, Any] = {}
    values = {**BASE, "data.source": str(folder / "text.txt"), **changes}
    if "lora.rank" in changes:
        values["checkpoint.load_weights"] = str(folder / "base")
    for key, value in {**values, "run.dir": str(folder / name)}.items():
        table = sections
        *path, name = key.split(".")
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return resolve(Config(**sections), 1, vocab_size=256, cuda=False)


def _results(folder: Path, config: ResolvedConfig) -> tuple[Any, ...]:
    """Train, and return the records without times, a hash of the weights and the files."""
    folder.mkdir(exist_ok=True)
    text = "".join(f"The {number} quick brown fox {number**2}.\n" for number in range(300))
    (folder / "text.txt").write_text(text)
    if config.lora.is_on:  # needs weights
        experts = {"moe.num_experts": config.moe.num_experts}
        train(_config(folder, {**experts, "train.steps": 1}, "base"), rank_context(0, 1))
    train(config, rank_context(0, 1))
    run = folder / "run"
    timed = ("time", "tokens_per", "flops", "memory", "slowest", "mfu")
    records = [
        {key: value for key, value in json.loads(line).items() if not any(t in key for t in timed)}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    _, weights = load_full_weights(run)
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    files = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    return json.dumps(records), digest.hexdigest(), files


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    found = {}
    for name, changes in BASES.items():
        folder = tmp_path_factory.mktemp(name)
        found[name] = _results(folder, _config(folder, changes))
    return found


@pytest.mark.parametrize(("base", "key", "value"), representatives(CASES, KEPT))
def test_no_setting_is_silently_without_effect(
    results: dict[str, tuple[Any, ...]], tmp_path: Path, base: str, key: str, value: Any
) -> None:
    try:
        config = _config(tmp_path, {**BASES[base], key: value})
    except ConfigError:
        return
    if key in SAME_RESULTS:
        return
    is_noted = any(f"{key} = " in note.rpartition(" no effect: ")[0] for note in config.notes)
    is_same = _results(tmp_path, config) == results[base]
    assert is_same == is_noted, (
        f"{key} = {value} {'changes nothing' if is_same else 'has an effect'}, but the notes are "
        f"{config.notes}: mend a rule of config/unused.py, or add the key to SAME_RESULTS"
    )


# ---- notes ---------------------------------------------------------------------------------------

EXPERTS: dict[str, Any] = {"moe.num_experts": 4}
CLONES: dict[str, Any] = {**EXPERTS, "moe.echo.num_spare_slots": 1}
SCALED: dict[str, Any] = {
    "model.rope_scaling.original_seq_length": 8,
    "model.rope_scaling.factor": 2.0,
}


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"moe.jitter": 0.1}, "moe.jitter", "moe.num_experts = 0"),
        ({**EXPERTS, "train.recompute": ["mlp"]}, "train.recompute", "moe.layer_pattern = e"),
        ({"train.recompute": ["full"], "train.recompute_keep": 2}, "train.recompute", "keep = 2"),
        ({"graphs.mode": "full", "train.steps": 3}, "graphs.mode", "graphs.warmup_steps = 3"),
        (CLONES, "moe.echo.num_spare_slots", "parallel.ep = 1"),
        ({**EXPERTS, "moe.drop_by": "position"}, "moe.drop_by", "capacity_factor = None"),
        ({**EXPERTS, "moe.over_budget": "drop"}, "moe.over_budget", "dispatcher = alltoall"),
        (
            {**EXPERTS, "moe.num_groups": 2, "moe.groups_top_k": 2},
            *("moe.num_groups", "groups_top_k = 2"),
        ),
        (
            {"optimizer.schedule": "constant", "optimizer.min_lr": 1e-4},
            *("optimizer.min_lr", "optimizer.schedule = constant"),
        ),
        ({"checkpoint.interval": -1, "checkpoint.keep": 3}, "checkpoint.keep", "interval = -1"),
        (
            {"optimizer.name": "lion", "optimizer.eps": 1e-6},
            *("optimizer.eps", "optimizer.name = lion"),
        ),
        (
            {"optimizer.muon.momentum": 0.5},
            *("optimizer.muon.momentum", "optimizer.name = adamw"),
        ),
        ({"optimizer.nesterov": True}, "optimizer.nesterov", "optimizer.name = adamw"),
        ({"train.on_spike": "stop"}, "train.on_spike", "train.steps = 4"),
        ({"train.eval_interval": 0, "train.eval_steps": 2}, "train.eval_steps", "interval = 0"),
        ({"model.window_pattern": "f", "model.sliding_window": 4}, "model.sliding_window", "= f"),
        (
            {**SCALED, "model.rope_scaling.type": "llama3", "model.rope_scaling.beta_fast": 3.0},
            *("model.rope_scaling.beta_fast", "type = llama3"),
        ),
        ({"data.sources": [{"path": "a"}, {"path": "b"}]}, "data.source", "data.sources (2)"),
    ],
)
def test_a_setting_without_effect_is_noted_with_its_reason(
    tmp_path: Path, changes: dict[str, Any], key: str, reason: str
) -> None:
    notes = [note for note in _config(tmp_path, changes).notes if "no effect" in note]
    [note] = [note for note in notes if f"{key} = " in note]
    assert note.endswith(reason)


def test_settings_of_the_optimizer_of_a_group_are_not_noted(tmp_path: Path) -> None:
    changes = {
        **{"optimizer.factory": "torch.optim:RMSprop", "optimizer.moments_dtype": "bfloat16"},
        **{"optimizer.beta1": 0.5, "optimizer.eps": 1e-6, "optimizer.muon.momentum": 0.5},
        **{"optimizer.momentum": 0.5, "optimizer.nesterov": True},
    }
    groups = [
        {"pattern": "layers.0.*", "optimizer": "muon"},
        {"pattern": "layers.1.*", "optimizer": "sgd"},
    ]

    def noted(*groups: dict[str, str]) -> set[str]:
        notes = _config(tmp_path, {**changes, "optimizer.groups": list(groups)}).notes
        text = " ".join(note for note in notes if "no effect: optimizer." in note)
        return {key.partition(".")[2] for key in changes if f"{key} = " in text.split(":")[0]}

    assert noted() >= {"moments_dtype"}
    assert noted(*groups) == set()
    assert noted(groups[0]) == {"momentum", "nesterov"}
    assert "muon.momentum" in noted(groups[1], {"pattern": "layers.0.*", "optimizer": "none"})


def test_defaults_are_not_noted_and_notes_are_not_repeated(tmp_path: Path) -> None:
    assert resolve(Config(), 1, vocab_size=256, cuda=False).notes == ()
    config = _config(tmp_path, {"moe.jitter": 0.1})
    assert len(config.notes) == 1
    assert resolve(config, 1, vocab_size=256, cuda=False).notes == config.notes


def test_every_rule_is_of_settings_that_exist() -> None:
    known = {f"{name}.{key}" for name, cls in section_classes().items() for key in cls.by_key()}
    for rule in UNUSED_RULES:
        assert {*rule.all_keys(), rule.reason, *rule.but} <= known


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({**EXPERTS, "moe.top_k": 1}, "set moe.normalize = false, or a balancing loss"),
        (
            {**EXPERTS, "moe.top_k": 1, "moe.score_function": "softmax_after_top_k"},
            'moe.normalize = false and moe.score_function = "softmax"',
        ),
        ({**EXPERTS, "moe.top_k": 1, "moe.normalize": False}, None),
        ({**EXPERTS, "moe.top_k": 1, "moe.aux_loss_coef": 0.01}, None),
        ({**EXPERTS, "moe.top_k": 2}, None),
        ({"optimizer.warmup": 20, "train.steps": 12}, "ends at 0.0018, below optimizer.lr"),
        (
            {"optimizer.warmup": 8 * 7 + 1, "optimizer.schedule_unit": "samples", "train.steps": 7},
            "is more than the 14 samples of the run",
        ),
        ({"optimizer.warmup": 4}, None),
        ({"optimizer.lr": 0.0}, "no weight changes"),
        ({"model.num_mtp_layers": 1, "model.mtp_loss_coef": 0.0}, "are not trained"),
        ({"model.activation": "relu2"}, 'no fused kernel for model.activation = "relu2"'),
        ({"model.norm_plus_one": True, "train.dtype": "bfloat16"}, "model.norm_plus_one in this"),
        ({"model.norm_plus_one": True}, None),
    ],
)
def test_surprising_settings_are_noted(
    tmp_path: Path, changes: dict[str, Any], expected: str | None
) -> None:
    notes = [note for note in _config(tmp_path, changes).notes if "no effect" not in note]
    assert notes == [] if expected is None else expected in notes[0]


@pytest.mark.parametrize("normalize", [True, False])
def test_the_router_of_one_expert_per_token_learns_unless_that_is_noted(
    tmp_path: Path, normalize: bool
) -> None:
    routers = []
    for steps in (1, 3):
        changes = {"moe.top_k": 1, "moe.normalize": normalize, "optimizer.weight_decay": 0.0}
        config = _config(tmp_path, {**EXPERTS, **changes, "train.steps": steps})
        assert any("router has no gradient" in note for note in config.notes) == normalize
        _results(tmp_path, config)
        _, weights = load_full_weights(tmp_path / "run")
        routers.append({name: value for name, value in weights.items() if "router" in name})
    assert routers[0]
    for name, value in routers[0].items():
        assert torch.equal(value, routers[1][name]) == normalize
