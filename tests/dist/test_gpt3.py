"""A model in the style of GPT-3, from its configuration alone to `transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megacore.parallel.batch import Microbatch
from megatrain.cli import main
from megatrain.generation.restore import restore_model
from tests.support.jobs import start_function

transformers = pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt3.toml"


@pytest.mark.dist
def test_a_trained_gpt3_is_a_gpt2_of_transformers(tmp_path: Path) -> None:
    words = ["train", str(EXAMPLE), "--nproc", "2", f"--run.dir={tmp_path / 'run'}", "--run.plain"]
    words += [f"--data.cache={tmp_path / 'cache'}", "--train.steps=4", "--train.eval_interval=0"]
    ended = start_function(lambda: main(words), tmp_path).finish(timeout_s=180)
    assert ended.code == 0, ended.err
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["loss"] < json.loads(records[0])["loss"]
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert type(theirs) is transformers.GPT2LMHeadModel
    assert not any(report.values()), report
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1))
    batch = Microbatch(tokens=tokens, labels=None, sample_ids=torch.arange(2), step=0)
    ours = restore_model(tmp_path / "run").model.eval().logits(None, batch)
    logits = theirs.eval()(input_ids=tokens).logits.detach()
    torch.testing.assert_close(logits, ours, rtol=1e-5, atol=1e-5)
