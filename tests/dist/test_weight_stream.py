"""Weights of a running model as Hugging Face tensors: those of export-hf, and back again."""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import CheckpointError, MegacoreError
from megatrain.checkpoint import TrainState, save_checkpoint
from megatrain.checkpoint.model_files import copy_kept_files
from megatrain.hf.export_checkpoint import export_checkpoint
from megatrain.hf_folder import TensorFiles
from megatrain.train.initial_weights import load_initial_weights
from megatrain.train.trainer import Trainer, build_trainer
from megatrain.train.weight_stream import plan_of_run, refresh_weights, stream_weights
from tests.dist.test_families import import_model, make_config
from tests.support.campaigns import representatives
from tests.support.configs import changed_config
from tests.support.distributed import run_ranks

TP2 = {"tp": 2}
PP2 = {"parallel": {"pp": 2}, "pipeline": {"layout": "Ett|tL"}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "dp2, average": (2, {"optimizer": {"ema_decay": 0.5}}),
    "dp2 without ZeRO-1": (2, {"optimizer": {"distributed": False}}),
    "tp2, bfloat16": (2, {"parallel": TP2, "train": {"dtype": "bfloat16"}}),
    "pp2, frozen": (
        2,
        {
            **PP2,
            "optimizer": {"groups": '[{pattern = "layers.0.*", optimizer = "none"}]'},
        },
    ),
    "pp2, 2 chunks": (
        2,
        {
            "parallel": {"pp": 2},
            "pipeline": {"schedule": "interleaved_1f1b", "num_chunks": 2, "layout": "Et|t|t|L"},
        },
    ),
    "dualpipe": (
        2,
        {"parallel": {"pp": 2}, "pipeline": {"schedule": "dualpipe", "layout": "Ett|tL"}},
    ),
    "tp2 pp2": (4, {"parallel": {"tp": 2, "pp": 2}, "pipeline": {"layout": "Ett|tL"}}),
    "tp2 cp2, overlap": (
        4,
        {
            "parallel": {"tp": 2, "cp": 2, "sequence_parallel": True},
            "optimizer": {"overlap": "all"},
        },
    ),
    "ep2": (2, {"parallel": {"ep": 2}}),
    "tp2, etp1 ep2": (2, {"parallel": {"tp": 2, "etp": 1, "ep": 2}}),
    "ep2 etp2": (4, {"parallel": {"tp": 2, "etp": 2, "ep": 2}}),
}
FAMILIES = ("llama", "qwen3-moe, first layer dense", "deepseek-v3", "gpt-oss", "ernie4-5", "gpt2")
WITHOUT_EXPERTS = ("llama", "ernie4-5", "gpt2")


def is_possible(family: str, layout: str) -> bool:
    """Return whether a family has the experts that a layout divides."""
    return "ep" not in LAYOUTS[layout][1].get("parallel", {}) or family not in WITHOUT_EXPERTS


CASES = [
    f"{family} | {layout}"
    for family in FAMILIES
    for layout in LAYOUTS
    if is_possible(family, layout)
]
REPRESENTATIVES = [
    "llama | tp2, bfloat16",
    "llama | dp2, average",
    "gpt2 | tp2 pp2",
    "ernie4-5 | tp2 cp2, overlap",
    "llama | pp2, frozen",
    "qwen3-moe, first layer dense | pp2, 2 chunks",
    "deepseek-v3 | ep2 etp2",
    "deepseek-v3 | dualpipe",
    "gpt-oss | tp2, etp1 ep2",
]


def start(world_size: int, folder: Path, changes: dict[str, Any]) -> Trainer:
    changes = {"run": {"dir": str(folder / "run")}, **changes}
    config = make_config(folder, world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    load_initial_weights(trainer, config.checkpoint.load_weights)
    return trainer


def held(stream: Iterator[tuple[str, Tensor | None]]) -> dict[str, Tensor | None]:
    return dict(stream)


def states(trainer: Trainer, *names: str) -> list[Tensor]:
    return [
        tensor.clone()
        for piece in trainer.pieces()
        for name, tensor in piece.tensors.items()
        if name in names
    ]


def model_weights(trainer: Trainer) -> list[Tensor]:
    """What the passes of this rank read."""
    return [param.detach().clone() for chunk in trainer.chunks for _, param in chunk.param_infos()]


def equal(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def stream_and_refresh(
    rank: int, world_size: int, folder: Path, changes: dict[str, Any]
) -> dict[str, dict[str, Tensor | None]]:
    trainer = start(world_size, folder, changes)
    for step in range(2):
        trainer.train_step(step)
    trainer.optimizer.finish_param_gather()
    save_checkpoint(
        folder / "run" / "checkpoints",
        trainer.pieces(),
        state=TrainState(step=2, samples=0, optimizer=trainer.optimizer.scalars()),
        config=trainer.config.model_dump(),
        groups=trainer.groups,
    )
    streams = {
        "": held(stream_weights(trainer)),
        "float32": held(stream_weights(trainer, to="all", dtype="float32")),
    }
    if trainer.average is not None:
        streams["averaged"] = held(stream_weights(trainer, averaged=True))
    # Another step, and back to the weights before it, with the moments after it.
    weights, exact = states(trainer, "main_param"), streams["float32"]
    used = model_weights(trainer)
    trainer.train_step(2)
    moments = states(trainer, "exp_avg", "exp_avg_sq", "ema")
    assert not equal(weights, states(trainer, "main_param"))
    of = "all" if world_size == 2 else "rank 0"
    given = reversed(exact.items()) if rank == 0 or of == "all" else None
    refresh_weights(trainer, given, of=of)
    assert equal(weights, states(trainer, "main_param"))
    assert equal(moments, states(trainer, "exp_avg", "exp_avg_sq", "ema"))
    assert trainer.optimizer.step_count == 3
    assert equal(used, model_weights(trainer))
    trainer.train_step(3)
    return streams


@pytest.mark.dist
@pytest.mark.parametrize("case", representatives(CASES, REPRESENTATIVES))
def test_stream_is_the_export_of_the_checkpoint_and_restores_the_weights(
    case: str, tmp_path: Path
) -> None:
    family, layout = case.split(" | ")
    world_size, changes = LAYOUTS[layout]
    import_model(family, tmp_path)
    copy_kept_files(tmp_path / "ours", tmp_path / "run")  # as a run does
    (tmp_path / "run" / "config.toml").touch()
    found = run_ranks(world_size, stream_and_refresh, world_size, tmp_path, changes)
    options: dict[str, dict[str, Any]] = {"": {}, "float32": {"dtype": "float32"}}
    if "averaged" in found[0]:
        options["averaged"] = {"averaged": True}
    for name, arguments in options.items():
        export_checkpoint(tmp_path / "run", tmp_path / f"out {name}", **arguments)
        files = TensorFiles(tmp_path / f"out {name}")
        stored = dict(stream_weights(tmp_path / "run", **arguments))
        assert found[0][name].keys() == stored.keys() == set(files.keys())
        for rank, streams in enumerate(found):
            for key, tensor in streams[name].items():
                if rank > 0 and name != "float32":
                    assert tensor is None
                    continue
                assert tensor.dtype == files[key].dtype == stored[key].dtype, key
                assert torch.equal(tensor, files[key]), key
                assert torch.equal(stored[key], files[key]), key


def broken(name: str, given: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """Tensors of the model with one mistake."""
    wrong = "model.layers.1.self_attn.k_proj.weight"
    for key, tensor in given.items():
        if key != wrong or name in ("", "another head"):
            yield key, tensor
        elif name == "shape":
            yield key, tensor[1:]
        elif name == "unknown":
            yield key, tensor
            yield "model.layers.9.self_attn.k_proj.weight", tensor
        elif name == "twice":
            yield from [(key, tensor)] * 2
        elif name == "type":
            yield key, tensor.long()
        elif name == "no tensor":
            yield key, None
        elif name == "failure":
            raise OSError("the server is gone")
    if name == "another head":
        yield "lm_head.weight", given["model.embed_tokens.weight"] + 1.0


MISTAKES = {
    "missing": "there is no tensor model.layers.1.self_attn.k_proj.weight, which the model needs",
    "shape": r"k_proj.weight must have shape \(16, 32\), got \(15, 32\)",
    "unknown": "tensor model.layers.9.self_attn.k_proj.weight has no place in a llama model",
    "twice": "k_proj.weight must come once, but it came a second time",
    "type": "k_proj.weight must be of float32, bfloat16 or float16, got int64",
    "no tensor": "k_proj.weight must be a tensor, got NoneType",
    "failure": "the server is gone",
    "another head": "lm_head.weight must equal model.embed_tokens.weight, which it shares",
}


def refresh_with_mistakes(rank: int, world_size: int, folder: Path, of: str) -> dict[str, str]:
    trainer = start(world_size, folder, PP2 if world_size == 2 else {})
    given = {
        name: tensor for name, tensor in stream_weights(trainer, to="all") if tensor is not None
    }
    messages = {}
    for name in MISTAKES:
        # Of each rank's own tensors, those of one rank are wrong.
        own = broken(name if rank == world_size - 1 or of == "rank 0" else "", given)
        try:
            refresh_weights(trainer, own if rank == 0 or of == "all" else None, of=of)
        except (MegacoreError, OSError) as error:
            messages[name] = str(error)
    refresh_weights(trainer, given.items(), of=of)
    trainer.train_step(0)
    return messages


@pytest.mark.dist
@pytest.mark.parametrize(("of", "world_size"), [("rank 0", 1), ("rank 0", 2), ("all", 2)])
def test_wrong_streams_are_refused_by_name_on_every_rank(
    of: str, world_size: int, tmp_path: Path
) -> None:
    import_model("llama", tmp_path, tie_word_embeddings=True)
    for messages in run_ranks(world_size, refresh_with_mistakes, world_size, tmp_path, of):
        assert messages.keys() == MISTAKES.keys()
        for name, pattern in MISTAKES.items():
            assert re.search(pattern, messages[name]), messages[name]


def stop_early(rank: int, folder: Path, who: tuple[int, ...]) -> str:
    trainer = start(2, folder, {"parallel": {"tp": 2}})
    message = ""
    try:
        for number, _ in enumerate(stream_weights(trainer)):
            assert torch.is_grad_enabled(), "the caller's code has its own mode"
            if rank in who and number == 3:
                break
    except MegacoreError as error:
        message = str(error)
    trainer.train_step(0)
    return message


@pytest.mark.dist
def test_a_rank_that_stops_early_is_an_error_on_the_others(tmp_path: Path) -> None:
    import_model("llama", tmp_path)
    for rank in (0, 1):
        messages = run_ranks(2, stop_early, tmp_path, (rank,))
        assert messages[rank] == ""
        assert "1 of 2 ranks stopped before the last tensor of the stream" in messages[1 - rank]
    assert run_ranks(2, stop_early, tmp_path, (0, 1)) == ["", ""]


def test_a_stream_needs_a_moving_average_and_a_known_choice(tmp_path: Path) -> None:
    import_model("llama", tmp_path)
    trainer = start(1, tmp_path, {})
    with pytest.raises(CheckpointError, match="there is no moving average of the weights"):
        next(stream_weights(trainer, averaged=True))
    with pytest.raises(CheckpointError, match="has no moving average of the weights"):
        next(stream_weights(tmp_path / "ours", averaged=True))
    with pytest.raises(ValueError, match='to must be "rank 0" or "all", got \'rank 1\''):
        stream_weights(trainer, to="rank 1")
    with pytest.raises(MegacoreError, match="dtype must be float32, bfloat16 or float16, got int8"):
        next(stream_weights(trainer, dtype="int8"))


@pytest.mark.dist
@pytest.mark.campaign
def test_the_example_streams_every_tenth_step(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples/weights/train.toml"
    command = [sys.executable, "-m", "megacore", "train", str(example), f"--run.dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    steps = re.findall(r"step (\d+): 38 tensors, 0.9 MB", done.stdout)
    assert steps == ["10", "20", "30", "40"]


def peak_of(action: Callable[[], None]) -> float:
    """Megabytes that an action holds beside what was there before, at its peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory would be used again without a trace
    Path("/proc/self/clear_refs").write_text("5")

    def read(name: str) -> int:
        text = Path("/proc/self/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+) kB", text)[1])

    before = read("VmRSS")
    action()
    return (read("VmHWM") - before) / 1024


def stream_a_large_model(rank: int) -> tuple[float, float]:
    sizes = {"hidden_size": 256, "num_layers": 8, "num_heads": 4, "vocab_size": 30_000}
    model = {**sizes, "ffn_hidden_size": 1024, "seq_length": 16, "tie_embeddings": False}
    base = {"model": model, "train": {"eval_interval": 0}}
    config = changed_config(2, base, {"parallel.tp": 2})
    trainer = build_trainer(config, world_size=2, device=torch.device("cpu"))
    shapes = {spec.name: spec.shape for spec in plan_of_run(trainer).tensors.specs}

    def out() -> None:
        for _ in stream_weights(trainer):
            pass

    def back() -> None:
        given = ((name, torch.zeros(shape)) for name, shape in shapes.items())
        refresh_weights(trainer, given if rank == 0 else None)

    return peak_of(out), peak_of(back)


@pytest.mark.dist
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_rank_holds_one_tensor_at_a_time() -> None:
    largest, whole = 30_000 * 256 * 4 / 2**20, 104.0
    (out_0, back_0), (out_1, back_1) = run_ranks(2, stream_a_large_model, timeout_s=300)
    assert max(out_0, back_0, back_1) < largest + 20 < whole, (out_0, back_0, back_1)
    assert out_1 < 20, "a rank that gets no tensor holds messages only"
