"""Weights of a run with adapters as a stream: merged, or adapters, and adapters back again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megatrain.checkpoint import TrainState, save_checkpoint
from megatrain.checkpoint.base_weights import BaseWeights
from megatrain.checkpoint.model_files import copy_kept_files
from megatrain.hf.export_adapter import export_adapter
from megatrain.hf.export_checkpoint import export_checkpoint
from megatrain.hf_folder import TensorFiles
from megatrain.train.trainer import build_trainer
from megatrain.train.weight_stream import (
    adapter_config,
    refresh_weights,
    stream_weights,
    weights_checksums,
)
from tests.dist.test_families import import_model
from tests.dist.test_weight_stream import (
    LAYOUTS,
    equal,
    held,
    is_possible,
    model_weights,
    peak_of,
    start,
    states,
)
from tests.support.campaigns import representatives
from tests.support.configs import changed_config
from tests.support.distributed import run_ranks
from tests.support.hf_models import save_theirs
from tests.support.lora_runs import save_lora_run

pytestmark = pytest.mark.dist
safetensors = pytest.importorskip("safetensors.torch")

# Of some projections of experts, and of all of others; modules that are trained whole.
KINDS: dict[str, dict[str, Any]] = {
    "all": {"rank": 2, "alpha": 3.0},
    "saved": {"rank": 3, "rs": True, "modules_to_save": ["embedding", "final_norm"]},
    "dora": {"rank": 2, "dora": True, "targets": ["attention.*"]},
    "some": {"rank": 2, "targets": ["q*", "up"]},
}
FAMILIES = ("llama", "qwen3-moe, first layer dense", "deepseek-v3", "gpt-oss", "ernie4-5", "gpt2")
CASES = [
    f"{family} | {layout} | {kind}"
    for family in FAMILIES
    for layout in LAYOUTS
    for kind in KINDS
    if is_possible(family, layout) and "frozen" not in layout
]
REPRESENTATIVES = [
    "llama | one process | dora",
    "llama | dp2, average | saved",
    "llama | tp2, bfloat16 | all",
    "gpt2 | tp2 pp2 | all",
    "deepseek-v3 | ep2 etp2 | all",
    "qwen3-moe, first layer dense | pp2, 2 chunks | some",
    "gpt-oss | tp2, etp1 ep2 | all",
]
FORMS: dict[str, dict[str, Any]] = {
    "merged": {},
    "merged, float32": {"dtype": "float32", "to": "all"},
    "adapters": {"adapters": True},
    "adapters, bfloat16": {"adapters": True, "dtype": "bfloat16", "to": "all"},
}


def stream_and_refresh(
    rank: int, world_size: int, folder: Path, changes: dict[str, Any]
) -> tuple[dict[str, dict[str, Tensor | None]], dict[str, Any]]:
    trainer = start(world_size, folder, changes)
    for step in range(2):
        trainer.train_step(step)
    trainer.optimizer.finish_param_gather()
    base = BaseWeights.of(folder / "ours")
    save_checkpoint(
        folder / "run" / "checkpoints",
        trainer.pieces(),
        state=TrainState(
            step=2, samples=0, optimizer=trainer.optimizer.scalars(), base=base.as_state()
        ),
        config=trainer.config.model_dump(),
        groups=trainer.groups,
    )
    streams = {name: held(stream_weights(trainer, **asked)) for name, asked in FORMS.items()}
    if trainer.average is not None:
        streams["averaged"] = held(stream_weights(trainer, adapters=True, averaged=True))
    exact = held(stream_weights(trainer, adapters=True, to="all"))
    # Another step, and back to the adapters before it, with the moments after it.
    weights, used = states(trainer, "main_param"), model_weights(trainer)
    trainer.train_step(2)
    moments = states(trainer, "exp_avg", "exp_avg_sq", "ema")
    assert not equal(weights, states(trainer, "main_param")) or not weights
    of = "all" if world_size == 2 else "rank 0"
    given = reversed(exact.items()) if rank == 0 or of == "all" else None
    refresh_weights(trainer, given, of=of)
    found = states(trainer, "main_param")
    names = [p.info.name for p in trainer.pieces() if "main_param" in p.tensors]
    for name, before, after in zip(names, weights, found, strict=True):
        assert torch.equal(before, after) or name.endswith("expert_bias"), name
    assert equal(moments, states(trainer, "exp_avg", "exp_avg_sq", "ema"))
    assert trainer.optimizer.step_count == 3
    if not any(name.endswith("expert_bias") for name in names):
        assert equal(used, model_weights(trainer))
    trainer.train_step(3)
    return streams, adapter_config(trainer)


@pytest.mark.parametrize("case", representatives(CASES, REPRESENTATIVES))
def test_streams_are_the_exports_of_the_checkpoint(case: str, tmp_path: Path) -> None:
    family, layout, kind = case.split(" | ")
    world_size, changes = LAYOUTS[layout]
    # A trainer merges weights in its own number format.
    dtype = torch.bfloat16 if "bfloat16" in layout else torch.float32
    import_model(family, tmp_path, dtype=dtype)
    copy_kept_files(tmp_path / "ours", tmp_path / "run")  # as a run does
    (tmp_path / "run" / "config.toml").touch()
    changes = {**changes, "lora": KINDS[kind]}
    results = run_ranks(world_size, stream_and_refresh, world_size, tmp_path, changes)
    forms = {**FORMS, "averaged": {"adapters": True, "averaged": True}}
    for name in results[0][0]:
        arguments = dict(forms[name])
        to_all = arguments.pop("to", None) == "all"
        stored = dict(stream_weights(tmp_path / "run", **arguments))
        out = tmp_path / f"out {name}"
        if arguments.pop("adapters", False):
            written = export_adapter(tmp_path / "run", out, **arguments).config
            files = TensorFiles(out, only="adapter_model.safetensors")
            assert all(config == written for _, config in results)
            assert adapter_config(tmp_path / "run") == written
        else:
            export_checkpoint(tmp_path / "run", out, merged=True, **arguments)
            files = TensorFiles(out)
        assert stored.keys() == set(files.keys())
        for rank, (streams, _) in enumerate(results):
            assert streams[name].keys() == stored.keys()
            for key, tensor in streams[name].items():
                if rank > 0 and not to_all:
                    assert tensor is None
                    continue
                assert tensor.dtype == files[key].dtype == stored[key].dtype, key
                assert torch.equal(tensor, files[key]), key
                assert torch.equal(stored[key], files[key]), key


Q = "base_model.model.model.layers.1.self_attn.q_proj"
MISTAKES = {
    "missing": f"there is no tensor {Q}.lora_B.weight, which the adapters need",
    "shape": r"q_proj.lora_B.weight must have shape \(32, 2\), got \(31, 2\)",
    "whole weight": "tensor model.norm.weight is not of the adapters of this run, such as base_mod",
    "twice": "q_proj.lora_B.weight must come once, but it came a second time",
    "type": "q_proj.lora_B.weight must be of float32, bfloat16 or float16, got int64",
    "not trained": "layers.1.mlp.down_bias is not trained, so it must be as in the base, but the",
    "failure": "the server is gone",
}


def broken(name: str, given: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """Tensors of adapters with one mistake."""
    for key, tensor in given.items():
        if name == "not trained" and key.endswith("c_proj.bias"):
            yield key, tensor + 1.0
        elif key != f"{Q}.lora_B.weight" or name in ("", "not trained"):
            yield key, tensor
        elif name == "shape":
            yield key, tensor[1:]
        elif name == "whole weight":
            yield "model.norm.weight", torch.ones(32)
        elif name == "twice":
            yield from [(key, tensor)] * 2
        elif name == "type":
            yield key, tensor.long()
        elif name == "failure":
            raise OSError("the server is gone")


def refresh_with_mistakes(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    lora = {"rank": 2, "targets": ["attention.*"], "modules_to_save": ["layers.1.mlp.down"]}
    parallel = {"tp": world_size}
    trainer = start(world_size, folder, {"parallel": parallel, "lora": lora})
    given = held(stream_weights(trainer, adapters=True, to="all"))
    messages = {}
    for name in MISTAKES:
        try:
            refresh_weights(trainer, broken(name, given) if rank == 0 else None)
        except (MegacoreError, OSError) as error:
            messages[name] = str(error)
    refresh_weights(trainer, given.items() if rank == 0 else None)
    trainer.train_step(0)
    return messages


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_adapters_are_refused_by_name_on_every_rank(world_size: int, tmp_path: Path) -> None:
    import_model("starcoder2", tmp_path)
    for messages in run_ranks(world_size, refresh_with_mistakes, world_size, tmp_path):
        assert messages.keys() == MISTAKES.keys()
        for name, pattern in MISTAKES.items():
            assert re.search(pattern, messages[name]), messages[name]


def test_what_has_no_meaning_is_one_sentence(tmp_path: Path) -> None:
    import_model("llama", tmp_path)
    plain = start(1, tmp_path, {})
    for source in (plain, tmp_path / "ours"):
        for ask in (lambda one: next(stream_weights(one, adapters=True)), adapter_config):
            with pytest.raises(
                MegacoreError, match=r"has no adapters \(lora\.rank is not set\); leave"
            ):
                ask(source)
    with pytest.raises(ValueError, match="base must be None for a trainer, which holds its base"):
        stream_weights(plain, base=tmp_path / "ours")
    with pytest.raises(MegacoreError, match=r"base must be None for .*, a run without adapters"):
        next(stream_weights(tmp_path / "ours", base=tmp_path))
    trainer = start(1, tmp_path, {"lora": KINDS["all"]})
    with pytest.raises(MegacoreError, match="dtype must be float32, bfloat16 or float16, got int8"):
        next(stream_weights(trainer, adapters=True, dtype="int8"))
    with pytest.raises(MegacoreError, match=r"tensor model\.embed_tokens\.weight is not of"):
        refresh_weights(trainer, stream_weights(trainer))


def test_the_base_of_a_checkpoint_may_have_been_moved(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "base")
    save_lora_run(tmp_path / "base", tmp_path / "run", rank=2)
    before = dict(stream_weights(tmp_path / "run"))
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(MegacoreError, match=r"adapters of the weights .* which do not exist"):
        next(stream_weights(tmp_path / "run"))
    after = dict(stream_weights(tmp_path / "run", base=tmp_path / "moved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert len(dict(stream_weights(tmp_path / "run", adapters=True))) == 2 * 7 * 3


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
@pytest.mark.filterwarnings("ignore")
def test_joined_experts_of_peft_are_taken(name: str, tmp_path: Path) -> None:
    """One tensor with the adapters of all experts, as PEFT has them in memory."""
    peft = pytest.importorskip("peft")
    theirs = import_model(name, tmp_path)
    trainer = start(1, tmp_path, {"lora": KINDS["all"]})
    trainer.train_step(0)
    trainer.train_step(1)
    weights = states(trainer, "main_param")
    own = dict(stream_weights(trainer, adapters=True))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter_config(trainer)))
    safetensors.save_file(own, tmp_path / "adapter" / "adapter_model.safetensors")
    model = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    given = peft.get_peft_model_state_dict(model)
    assert any("experts.base_layer.lora_A" in key for key in given)
    assert own.keys() != given.keys()
    trainer.train_step(2)
    assert not equal(weights, states(trainer, "main_param"))
    refresh_weights(trainer, given.items())
    assert equal(weights, states(trainer, "main_param"))


def test_a_trained_projection_may_be_fixed_and_counts_in_the_checksum(tmp_path: Path) -> None:
    import_model("llama", tmp_path)
    sums = [weights_checksums(start(1, tmp_path, {}))]
    fixed = '[{pattern = "*.lora_a", optimizer = "none"}]'
    trainer = start(1, tmp_path, {"lora": KINDS["all"], "optimizer": {"groups": fixed}})
    # Adapters whose B is zero do not change the model.
    sums.append(weights_checksums(trainer))
    before = dict(stream_weights(trainer, adapters=True))
    trainer.train_step(0)
    trainer.train_step(1)
    sums.append(weights_checksums(trainer))
    assert sums[0] == sums[1] != sums[2]
    for name, value in stream_weights(trainer, adapters=True):
        assert torch.equal(value, before[name]) == ("lora_A" in name), name
    refresh_weights(trainer, before.items())
    assert weights_checksums(trainer) == sums[0]


def merge_a_large_model(_rank: int) -> float:
    sizes = {"hidden_size": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
    model = {**sizes, "ffn_hidden_size": 30_000, "seq_length": 16}
    base = {"model": model, "train": {"eval_interval": 0}, "lora": {"rank": 2}}
    config = changed_config(2, base, {"parallel.tp": 2})
    trainer = build_trainer(config, world_size=2, device=torch.device("cpu"))

    stream, peaks, got = stream_weights(trainer), [0.0], []
    while not got or got.pop() is not None:  # a tensor is free before the next one is merged
        peaks.append(peak_of(lambda: got.append(next(stream, None))))
    return max(peaks)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_one_projection_is_merged_at_a_time() -> None:
    largest = 30_000 * 256 * 4 / 2**20
    first, second = run_ranks(2, merge_a_large_model, timeout_s=300)
    assert largest < first < 2 * largest + 20, "a tensor, and as much to merge it"
    assert second < 20, "a rank that gets no tensor holds messages only"
