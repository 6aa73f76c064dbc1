"""``megacore export-hf``: what it writes is what was imported, and what transformers loads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megacore.errors import CheckpointError, MegacoreError
from megacore.parallel import ProcessGroups
from megacore.parallel.batch import Microbatch
from megatrain.checkpoint import StoredWeights, TrainState, save_checkpoint
from megatrain.cli import main
from megatrain.config import Config, resolve
from megatrain.generation.restore import restore_model
from megatrain.hf import config_to_hf, sections_from_hf
from megatrain.hf.export_checkpoint import export_checkpoint
from megatrain.hf.import_checkpoint import import_checkpoint
from megatrain.hf_folder import TensorFiles
from megatrain.train.trainer import build_trainer
from tests.support.hf_models import EACH, MODELS, save_theirs

transformers = pytest.importorskip("transformers")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = TensorFiles(folder)
    return {name: files[name] for name in files.keys()}  # noqa: SIM118


def names_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def content_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def change_config(folder: Path, name: str = "config.json", **entries: Any) -> None:
    """Change entries of a JSON file; ``...`` removes one."""
    content = content_of(folder / name) | entries
    content = {key: value for key, value in content.items() if value is not ...}
    (folder / name).write_text(json.dumps(content))


def logits_of(path: Path, tokens: Tensor) -> Tensor:
    model = restore_model(path).model.eval()
    batch = Microbatch(tokens=tokens, labels=None, sample_ids=torch.arange(tokens.shape[0]), step=0)
    return model.logits(None, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_an_export_of_an_import_has_the_same_files(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_theirs(name, tmp_path / "theirs", dtype)
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours", seq_length=8)
    done = export_checkpoint(tmp_path / "ours", tmp_path / "back")
    first, second = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "back")
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype, key
        assert torch.equal(tensor, second[key]), key
    assert names_of(tmp_path / "back") == names_of(tmp_path / "theirs")
    for file in ("config.json", "generation_config.json"):
        assert content_of(tmp_path / "back" / file) == content_of(tmp_path / "theirs" / file)
    assert done.dtype == str(dtype).removeprefix("torch.")
    assert done.notes == ()


@pytest.mark.parametrize("name", EACH)
def test_transformers_loads_an_export_and_has_our_logits(name: str, tmp_path: Path) -> None:
    save_theirs(name, tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours", seq_length=16)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", max_shard_bytes=40_000)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = torch.randint(0, 70, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        loaded.eval()(input_ids=tokens).logits.detach(),
        logits_of(tmp_path / "ours", tokens),
        rtol=1e-5,
        atol=1e-5,
    )


def test_weights_are_split_into_files_below_the_limit(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "theirs")
    imported = import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    done = export_checkpoint(tmp_path / "ours", tmp_path / "back", max_shard_bytes=40_000)
    assert imported.num_params == done.num_params  # both without the padding of the vocabulary
    assert len(done.files) > 2
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in done.files}
    tensors = tensors_of(tmp_path / "back")
    sizes = dict.fromkeys(index["weight_map"].values(), 0)
    for name, file in index["weight_map"].items():
        sizes[file] += tensors[name].nbytes
    assert max(sizes.values()) <= 40_000
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert done.num_params * 4 == sum(sizes.values())


def train_from_scratch(folder: Path, changes: dict[str, Any]) -> Config:
    """A run of one step with a checkpoint, as `megacore train` writes it."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": 32, "num_layers": 2, "num_kv_heads": 2, "seq_length": 16},
        "train": {"steps": 2, "global_batch_size": 4, "microbatch_size": 2, "eval_interval": 0},
        "optimizer": {"lr": 1e-2},
    }
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    config = resolve(Config(**sections), 1, vocab_size=256, cuda=False)
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    trainer.train_step(0)
    save_checkpoint(
        folder / "checkpoints",
        trainer.pieces(),
        state=TrainState(step=1, samples=4, optimizer=trainer.optimizer.scalars()),
        config=config.model_dump(),
        groups=ProcessGroups.single(),
    )
    return config


def test_the_moving_average_is_exported_on_request(tmp_path: Path) -> None:
    train_from_scratch(tmp_path / "run", {"optimizer.ema_decay": 0.75})
    weights = {}
    for flags in ([], ["--ema"]):
        out = tmp_path / f"out{len(flags)}"
        assert main(["export-hf", str(tmp_path / "run"), str(out), *flags]) == 0
        weights[len(flags)] = tensors_of(out)
    assert weights[0].keys() == weights[1].keys()
    with StoredWeights(tmp_path / "run", averaged=True) as stored:
        average = stored.read_param("layers.0.mlp.down")
    down = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(weights[1][down], average)
    assert not torch.equal(weights[0][down], average)
    train_from_scratch(tmp_path / "plain", {})
    assert main(["export-hf", str(tmp_path / "plain"), str(tmp_path / "none"), "--ema"]) != 0
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"model.qk_norm": "head", "model.head_dim": 12}, "qwen3"),
        ({"moe.num_experts": 4, "moe.score_function": "softmax_after_top_k"}, "mixtral"),
        (
            {"moe.num_experts": 4, "moe.layer_pattern": "de", "model.qk_norm": "head"},
            "qwen3_moe",
        ),
    ],
)
def test_a_model_from_scratch_is_exported_as_the_family_of_its_shape(
    changes: dict[str, Any], family: str, tmp_path: Path
) -> None:
    train_from_scratch(tmp_path / "run", changes)
    done = export_checkpoint(tmp_path / "run", tmp_path / "out", dtype="float32")
    assert done.config["model_type"] == family
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.config.eos_token_id is None  # not that of the family's first model
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        loaded(input_ids=tokens).logits.detach(),
        logits_of(tmp_path / "run", tokens),
        rtol=1e-5,
        atol=1e-5,
    )


def test_a_model_without_a_family_is_refused_with_the_setting_that_differs(tmp_path: Path) -> None:
    train_from_scratch(tmp_path / "run", {"moe.num_experts": 4, "moe.shared_ffn_hidden_size": 8})
    with pytest.raises(MegacoreError, match=r"no supported family .* shape of this model") as error:
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert "granitemoeshared has model.attention_scale = 1.0 instead of none" in str(error.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(MegacoreError, match=r"the family must be one of llama, .* got 'bert'"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", family="bert")


def test_families_that_fit_are_found_by_reading_their_configuration_back() -> None:
    config = resolve(Config(), 1, vocab_size=256, cuda=False)
    for family in ("llama", "mistral"):
        entries = config_to_hf(config.model, config.moe, family=family)
        model, _ = sections_from_hf(entries, seq_length=config.model.seq_length)
        assert dict(model) == {**dict(config.model), "init_std": model.init_std}
    with pytest.raises(MegacoreError, match=r'qwen3 has model.qk_norm = "head" instead of "none"'):
        config_to_hf(config.model, config.moe, family="qwen3")


def test_the_command_exports_a_step_with_the_files_of_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_theirs("llama", tmp_path / "theirs")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.save(str(tmp_path / "theirs" / "tokenizer.json"))
    (tmp_path / "theirs" / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    (tmp_path / "theirs" / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert main(["import-hf", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    run, out = str(tmp_path / "ours"), str(tmp_path / "back")
    assert main(["export-hf", run, out, "--step=0", "--dtype=float16", "--max-shard-size=1GB"]) == 0
    assert "float16, as LlamaForCausalLM in 1 file" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json"):
        theirs, ours = (tmp_path / folder / name for folder in ("theirs", "back"))
        assert theirs.read_text() == ours.read_text()
    assert content_of(tmp_path / "back" / "generation_config.json")["eos_token_id"] == 1
    config = content_of(tmp_path / "back" / "config.json")
    assert config == content_of(tmp_path / "theirs" / "config.json") | {"dtype": "float16"}
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "back").values()} == {torch.float16}

    assert main(["export-hf", run, out]) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err
    assert main(["export-hf", run, f"{out}2", "--step=7"]) == 2
    assert "has no checkpoint of step 7; the steps are: 0" in capsys.readouterr().err
    assert main(["export-hf", run, f"{out}2", "--max-shard-size=big"]) == 2
    assert "with a unit, such as 500MB or 5GB, got 'big'" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="no checkpoint"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "none")


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float64, torch.float32),
    ],
)
def test_imported_weights_keep_their_number_format(
    dtype: torch.dtype, kept: torch.dtype, tmp_path: Path
) -> None:
    save_theirs("llama", tmp_path / "theirs", dtype)
    done = import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    # float16 is a format of files: training in it would need a loss scale.
    trained = torch.bfloat16 if kept == torch.float16 else kept
    assert done.config.train.dtype == str(trained).removeprefix("torch.")
    assert [note for note in done.notes if "float16" in note] == list(done.notes[: trained != kept])
    stored = StoredWeights(tmp_path / "ours")
    assert {stored.dtype(name) for name in stored.names()} == {kept}
    size = sum(path.stat().st_size for path in done.checkpoint.glob("*.distcp"))
    assert size < done.num_params * kept.itemsize * 1.1 + 100_000
    model = restore_model(tmp_path / "ours").model
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("byte", [0.1, 0.5, 0.9])
def test_a_damaged_checkpoint_is_not_exported(byte: float, tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "theirs")
    done = import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    [file] = done.checkpoint.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[int(byte * len(content))] ^= 8
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        export_checkpoint(tmp_path / "ours", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        export_checkpoint(tmp_path / "ours", tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_an_interrupted_export_or_import_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_theirs("llama", tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(StoredWeights, "verify", interrupted)  # all tensors are written then
        with pytest.raises(KeyboardInterrupt):
            export_checkpoint(tmp_path / "ours", tmp_path / "new" / "deep" / "out")
        patched.setattr("megatrain.checkpoint.checked_files.check_content", interrupted)
        with pytest.raises(KeyboardInterrupt):
            import_checkpoint(tmp_path / "theirs", tmp_path / "new" / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]
    import_checkpoint(tmp_path / "theirs", tmp_path / "again")
    export_checkpoint(tmp_path / "again", tmp_path / "out")
    assert tensors_of(tmp_path / "out").keys() == tensors_of(tmp_path / "theirs").keys()


_TERMINATED = """
import os, signal, sys, time
from megatrain.checkpoint import StoredWeights
from megatrain.cli import main

def verify(self):  # all tensors are written then
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

StoredWeights.verify = verify
sys.exit(main(["export-hf", *sys.argv[1:]]))
"""


def test_a_terminated_export_leaves_nothing(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new" / "out", tmp_path / "empty"):
        command = [sys.executable, "-c", _TERMINATED, str(tmp_path / "ours"), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, ""), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "ours", "theirs"]
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.1.mlp.up_proj.weight", float("nan")),
        ("model.layers.0.self_attn.k_proj.weight", float("-inf")),
        ("model.norm.weight", float("inf")),
    ],
)
def test_an_import_names_a_tensor_that_is_not_finite(
    name: str, value: float, tmp_path: Path
) -> None:
    save_theirs("llama", tmp_path / "theirs")
    assert import_checkpoint(tmp_path / "theirs", tmp_path / "ours").not_finite is None
    [file] = (tmp_path / "theirs").glob("*.safetensors")
    tensors = load_file(file)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    assert import_checkpoint(tmp_path / "theirs", tmp_path / "again").not_finite == name
