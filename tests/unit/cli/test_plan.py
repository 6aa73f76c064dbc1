from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megacore.buffers import make_buffers
from megacore.parallel import ProcessGroups
from megatrain.cli import main
from megatrain.config import load_config, resolve
from megatrain.models.build import build_chunks
from megatrain.models.size import count_parameters
from megatrain.plan.run_plan import plan_run

TOML = """\
[model]
hidden_size = 32
num_layers = 6
num_heads = 4
vocab_size = 300
[parallel]
tp = 2
pp = 2
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "x.toml"
    path.write_text(TOML)
    return path


def plan_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_shows_layers_parameters_and_schedule(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(capsys, str(config), "--world-size=8")
    assert plan == plan_of(capsys, str(config), "--nproc=8")
    assert (plan["world_size"], plan["dp"], plan["num_microbatches"]) == (8, 2, 4)
    assert [rank["layers"] for rank in plan["ranks"]] == [[[0, 3]], [[3, 6]]]
    assert [rank["peak_in_flight"] for rank in plan["ranks"]] == [2, 1]
    assert plan["bubble_fraction"] == pytest.approx(1 / 5)
    resolved = resolve(load_config(config), 8, vocab_size=256, cuda=False)
    assert plan["num_params"] == count_parameters(resolved.model).total


def test_plan_needs_the_tokenizer_only_for_the_size_of_the_vocabulary(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ("--world-size=8", "--data.tokenizer=missing/tokenizer.json")
    plan = plan_of(capsys, str(config), *missing)
    assert plan == plan_of(capsys, str(config), "--world-size=8")
    assert main(["plan", str(config), *missing, "--model.vocab_size=none"]) == 2
    assert "tokenizer file missing/tokenizer.json does not exist" in capsys.readouterr().err


def test_plan_names_the_fix_for_an_impossible_layout(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config), "--world-size", "6"]) == 2
    assert "does not fit 6 processes (--world-size)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--buffers", "--json"), "--buffers prints buffers as text, --json"),
        (("--shard=0", "--json"), "--shard prints buffers as text, --json"),
        (("--buffers", "--echo", "--json"), "--buffers prints buffers as text, --echo"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], named: str
) -> None:
    assert main(["plan", str(config), *options]) == 2
    printed = capsys.readouterr()
    assert (printed.out, named in printed.err) == ("", True)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("--world-size=99999999998", "run.nproc = 99999999998: must be below 2,147,483,648"),
        ("--model.num_layers=1000000", "model.num_layers = 1000000: must be at most 16384"),
    ],
)
def test_sizes_that_no_machine_has_are_refused_at_once(
    config: Path, capsys: pytest.CaptureFixture[str], setting: str, reason: str
) -> None:
    always = ("--parallel.pp=1", "--train.global_batch_size=399999999992")
    assert main(["plan", str(config), *always, setting]) == 2
    assert reason in capsys.readouterr().err


def test_plan_prints_a_table_that_no_narrow_terminal_cuts(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    settings = ("--pipeline.schedule=interleaved_1f1b", "--pipeline.num_chunks", "3")
    assert main(["plan", str(config), *settings]) == 0
    printed = capsys.readouterr().out
    assert "embed 0 | 2 | 4" in printed
    assert "1 | 3 | 5 head" in printed
    assert "…" not in printed


def test_in_a_v_the_head_is_on_the_first_rank(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--pipeline.schedule=zb_v", "--model.num_layers=4")
    assert main(["plan", str(config), *settings]) == 0
    printed = capsys.readouterr().out
    assert "embed 0 | 3 head " in printed
    assert "1 | 2 " in printed
    assert printed.count("head") == 1


def test_plan_counts_both_copies_of_a_model(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--model.num_layers=4", "--train.global_batch_size=64", "--world-size=8")
    settings = ("--parallel.tp=1", "--parallel.pp=4", *sizes)
    both = (*settings, "--pipeline.schedule=dualpipe")
    one, two = (plan_of(capsys, str(config), *given)["ranks"] for given in (settings, both))
    plan = plan_of(capsys, str(config), *both)
    assert plan["num_params"] == plan_of(capsys, str(config), *settings)["num_params"]
    assert [rank["layers"] for rank in two] == [[[s, s + 1], [3 - s, 4 - s]] for s in range(4)]
    for rank in range(4):
        held = one[rank]["num_params"] + one[3 - rank]["num_params"]
        held -= 384 * 32 if rank in (0, 3) else 0  # embedding and head are one parameter
        assert two[rank]["num_params"] == held
        assert 0 <= two[rank]["param_bytes"] - 4 * held < 0.01 * 4 * held  # padding
        assert two[rank]["grad_bytes"] == two[rank]["param_bytes"]
        # Two moments; dp 2 x 2 copies share them, so a rank has as many as with one copy.
        assert two[rank]["optimizer_bytes"] == 2 * two[rank]["param_bytes"] / 4
    assert main(["plan", str(config), *both]) == 0
    printed = capsys.readouterr().out
    assert "3 head | embed 0" in printed
    assert "sharded over dp and both copies of the model" in printed
    assert "with d = 4" in printed


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("--world-size=3", "--parallel.pp=3"), "dualpipe needs an even number, for example 4"),
        (("--world-size=2", "--train.global_batch_size=20"), "one half in each direction: use 4"),
        (("--world-size=2", "--train.global_batch_size=8"), "needs at least 2 per rank: 4"),
    ],
)
def test_sizes_without_two_directions_are_refused_with_the_nearest(
    config: Path, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...], reason: str
) -> None:
    always = ("--parallel.tp=1", "--pipeline.schedule=dualpipe")
    assert main(["plan", str(config), *always, *settings]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_planned_bytes_are_those_of_the_real_buffers(config: Path, dtype: str, tied: str) -> None:
    settings = [
        ("parallel.tp", "1"),
        ("parallel.pp", "1"),
        ("train.dtype", dtype),
        ("model.tie_embeddings", tied),
    ]
    resolved = resolve(load_config(config, settings), 1, vocab_size=256, cuda=False)
    groups = ProcessGroups.single()
    chunks = build_chunks(resolved, groups)
    params = [param for chunk in chunks for param in chunk.param_infos()]
    [buffer] = make_buffers(params, groups=groups, options=resolved.optimizer.buffer_options())
    [rank] = plan_run(resolved, 1).ranks
    assert rank.param_bytes == buffer.param_data.nbytes
    assert rank.grad_bytes == buffer.grad_data.nbytes
    moments = 2 * 4 * buffer.shard_plan.shard_numel
    main_params = 4 * buffer.shard_plan.shard_numel if dtype != "float32" else 0
    assert rank.optimizer_bytes == moments + main_params
    assert rank.num_params == sum(param.numel() for _, param in params)


def test_sharding_divides_the_optimizer_state_only(config: Path) -> None:
    whole, sharded = (
        plan_run(
            resolve(
                load_config(config, [("optimizer.distributed", sharded)]),
                16,
                vocab_size=256,
                cuda=False,
            ),
            16,
        ).ranks[0]
        for sharded in ("false", "true")
    )
    assert (whole.param_bytes, whole.grad_bytes) == (sharded.param_bytes, sharded.grad_bytes)
    assert whole.optimizer_bytes == 4 * sharded.optimizer_bytes


def test_a_tied_head_is_held_but_not_counted_twice(config: Path) -> None:
    resolved = resolve(load_config(config, [("parallel.tp", "1")]), 2, vocab_size=256, cuda=False)
    plan = plan_run(resolved, 2)
    held = sum(rank.num_params for rank in plan.ranks)
    assert held == plan.num_params + 384 * 32


def test_plan_shows_buckets_and_bytes_per_parameter(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--world-size=8", "--optimizer.bucket_numel=5000", "--train.dtype=bfloat16")
    [first, last] = plan_of(capsys, str(config), *settings)["ranks"]
    assert sum(first["bucket_numels"]) * 2 == first["param_bytes"]
    assert len(first["bucket_numels"]) > 3
    assert all(numel % 128 == 0 for numel in last["bucket_numels"])
    assert main(["plan", str(config), *settings]) == 0
    assert "bytes per parameter: 6 + 12/d = 12 with d = 2" in capsys.readouterr().out
    context = ("--parallel.tp=1", "--parallel.cp=2")  # its ranks share the state too
    assert main(["plan", str(config), *settings, *context]) == 0
    assert "bytes per parameter: 6 + 12/d = 9 with d = 4" in capsys.readouterr().out


def test_plan_tells_bytes_of_dense_and_expert_parameters_apart(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(TOML + "[moe]\nnum_experts = 8\n")
    assert main(["plan", str(config), "--world-size=16", "--parallel.ep=4"]) == 0
    text = "bytes per parameter: 8 + 8/d = 10 with d = 4 (dense), 16 with d = 1 (experts); padding"
    assert text in capsys.readouterr().out
    whole = ("--world-size=16", "--parallel.ep=4", "--optimizer.distributed=false")
    assert main(["plan", str(config), *whole]) == 0
    assert "bytes per parameter: 16; padding" in capsys.readouterr().out
    assert main(["plan", str(config), "--world-size=16", "--parallel.etp=2"]) == 0
    assert "bytes per parameter: 8 + 8/d = 10 with d = 4; padding" in capsys.readouterr().out


def test_plan_tells_bytes_of_groups_with_another_optimizer(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [("layers.0.*", "none"), ("embedding", "sgd"), ("layers.*", "muon")]
    tables = [f'[[optimizer.groups]]\npattern = "{p}"\noptimizer = "{o}"\n' for p, o in groups]
    config.write_text(TOML + "".join(tables))
    assert main(["plan", str(config), "--world-size=4"]) == 0
    shown = capsys.readouterr().out
    sizes = ("parameter: 8 + 8/d", "embedding: 8 + 4/d", "layers.* (matrices): 8 + 4/d")
    assert all(size in shown for size in (*sizes, "layers.* (others): 8 + 8/d")), shown
    assert "of layers.0" not in shown


def test_plan_shows_where_each_parameter_lies(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--world-size=8", "--optimizer.bucket_numel=5000", "--buffers")
    assert main(["plan", str(config), *settings]) == 0
    first, last = capsys.readouterr().out.split("\n\n")
    assert first.startswith("pp 0, dense parameters: ")
    assert " on each of 2 ranks\n  bucket 0 [0, " in first
    assert "    [0, 2,048) layers.2.mlp.down\n" in first
    assert last.startswith("pp 1, dense parameters: ")
    assert last.splitlines()[-1].endswith(") layers.3.attention.norm")


def test_plan_names_the_optimizer_of_each_buffer(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config), "--world-size=4", "--buffers", "--optimizer.name=muon"]) == 0
    heads = [text.splitlines()[0] for text in capsys.readouterr().out.split("\n\n")]
    assert any(head.startswith("pp 0, dense parameters of Muon: ") for head in heads)
    assert any(head.startswith("pp 0, dense parameters of AdamW: ") for head in heads)


def test_plan_shows_what_each_rank_owns(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numels = dict[str, int]()
    for shard in range(4):
        settings = ("--world-size=8", "--parallel.tp=1", "--optimizer.bucket_numel=5000")
        assert main(["plan", str(config), *settings, f"--shard={shard}"]) == 0
        first = capsys.readouterr().out.split("\n\n")[0]
        for line in first.splitlines()[1:]:
            ranges = [
                [int(number.replace(",", "")) for number in found]
                for found in re.findall(r"\[([\d,]+), ([\d,]+)\)", line)
            ]
            assert line.startswith(f"  rank {shard}: world [")
            assert len({end - start for start, end in ranges}) == 1
            name = line.split()[-1]
            numels[name] = numels.get(name, 0) + ranges[0][1] - ranges[0][0]
    assert numels["layers.0.attention.norm"] == 32
    assert numels["layers.0.mlp.down"] == 2 * 2048  # half of it with tp 2, see above
    for wrong in (-1, 4):
        assert main(["plan", str(config), *settings, f"--shard={wrong}"]) == 2
        assert "4 ranks share a buffer, 0 to 3" in capsys.readouterr().err


def test_planned_gradients_may_have_the_format_of_the_parameters(config: Path) -> None:
    settings = [("train.dtype", "bfloat16"), ("optimizer.grad_dtype", "param")]
    first = plan_run(
        resolve(load_config(config, settings), 8, vocab_size=256, cuda=False), 8
    ).ranks[0]
    assert first.grad_bytes == first.param_bytes


def test_plan_counts_experts_where_they_are(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(
        TOML + '[moe]\nnum_experts = 8\nlayer_pattern = "d(e)"\nffn_hidden_size = 24\n'
    )
    whole = plan_of(capsys, str(config), "--world-size=4")
    split = plan_of(capsys, str(config), "--world-size=8", "--parallel.ep=2", "--parallel.etp=1")
    assert split["num_params"] == whole["num_params"] > split["num_active_params"]
    all_experts = 5 * 8 * 3 * 24 * 32  # layers, experts, matrices
    idle = whole["num_params"] - whole["num_active_params"]
    assert idle == all_experts * 6 // 8
    # etp 2 holds half of each expert; etp 1 x ep 2 the whole of every second one.
    assert [r["num_params"] for r in split["ranks"]] == [r["num_params"] for r in whole["ranks"]]
    assert main(["plan", str(config), "--world-size=8", "--parallel.ep=2"]) == 0
    text = capsys.readouterr().out
    assert "etp 2 x ep 2 x edp 1 x pp 2" in text
    assert "per token" in text
    assert main(["plan", str(config), "--world-size=4", "--moe.num_groups=3"]) == 2
    assert (
        "num_groups = 3 does not divide num_experts = 8; use one of [1, 2, 4, 8]"
        in capsys.readouterr().err
    )


# ---- predictions ---------------------------------------------------------------------------------

LARGE = """\
[model]
hidden_size = 8192
num_layers = 80
num_heads = 64
num_kv_heads = 8
ffn_hidden_size = 28672
vocab_size = 128256
seq_length = 4096
tie_embeddings = false
[parallel]
tp = 4
pp = 4
sequence_parallel = true
[train]
dtype = "bfloat16"
microbatch_size = 1
global_batch_size = 64
recompute = ["selective"]
[optimizer]
overlap = "grads"
"""


@pytest.fixture
def large(tmp_path: Path) -> str:
    path = tmp_path / "large.toml"
    path.write_text(LARGE)
    return str(path)


def test_a_prediction_prints_bytes_time_and_advice(
    large: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    assert main(["plan", large, "--gpus=64", f"--svg={svg}", f"--trace={trace}"]) == 0
    out = capsys.readouterr().out
    assert "fits:" in out
    assert re.search(r"step \S+ s \(\S+ s to \S+ s\), [\d,]+ tokens/s per GPU", out)
    assert out.count("tried ") == 3
    assert svg.read_text().startswith("<svg")
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_prediction_of_a_small_model_is_in_mib(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config), "--gpus=8"]) == 0
    out = capsys.readouterr().out
    assert "\nMiB of each rank at a pipeline position" in out
    weights, gradients = map(float, out.splitlines()[1].split()[4:6])
    assert 0 < weights <= gradients
    assert re.search(r"tried .*: (\+\d+\.\d [MK]iB|equal memory), ", out)


EXPERTS = ("--moe.num_experts=8", "--moe.ffn_hidden_size=3584", "--imbalance=1.5")


def test_a_prediction_counts_clones(large: str, capsys: pytest.CaptureFixture[str]) -> None:
    clones = (*EXPERTS, "--parallel.ep=4", "--parallel.etp=1", "--moe.echo.num_spare_slots=2")
    assert main(["plan", large, "--gpus=64", *clones]) == 0
    out = capsys.readouterr().out
    assert "all 2 slots of clones filled, imbalance with them 1.01" in out
    assert "K clones" in out
    assert main(["plan", large, "--gpus=64", *clones, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"][0]["bytes"]["slots of clones"] == 2 * 3 * 3584 * 8192 * (2 + 4)


def test_a_search_writes_layouts_that_the_domain_of_clones_divides(
    large: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = str(tmp_path / "best.toml")
    domain = (
        *EXPERTS,
        "--parallel.ep=4",
        "--moe.echo.num_spare_slots=2",
        "--moe.echo.domain_size=4",
    )
    assert main(["plan", large, "--gpus=64", *domain, "--search", f"--write={best}"]) == 0
    capsys.readouterr()
    assert main(["plan", best, "--gpus=64", "--imbalance=1.5"]) == 0
    assert "slots of clones filled" in capsys.readouterr().out


def test_the_exit_code_says_that_a_run_does_not_fit(
    large: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [large, "--gpus=16", "--json"]
    assert main(["plan", *arguments]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "does not fit"
    assert found["margin_bytes"] < 0
    assert found["ranks"][0]["total_bytes"] == pytest.approx(
        sum(found["ranks"][0]["bytes"].values())
    )
    assert main(["plan", *arguments, "--device=b300"]) == 0


def test_scaling_lists_a_line_for_each_number(
    large: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", large, "--gpus=64,128", "--tokens=1e9", "--price=2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +64 .* 100%$", out, re.MULTILINE)
    assert re.search(r"^ *128 ", out, re.MULTILINE)
    assert out.count("cost") == 2


def test_the_best_layout_of_a_search_can_be_written_and_planned(
    large: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = str(tmp_path / "best.toml")
    assert main(["plan", large, "--gpus=64", "--search", "--top=3", f"--write={best}"]) == 0
    assert "simulated exactly" in capsys.readouterr().out
    assert main(["plan", best, "--gpus=64", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert main(["plan", large, "--gpus=64", "--json"]) == 0
    assert written["step_s"] <= json.loads(capsys.readouterr().out)["step_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus=64", "--device=h10"], "did you mean h100"),
        (["--gpus=x"], "--gpus must be whole numbers"),
        (["--gpus=6"], "does not fit 6 processes (--gpus)"),
        (["--gpus=64", "--imbalance=0.5"], "--imbalance must be at least 1"),
        (["--gpus=64", "--nodes-of=0"], "--nodes-of must be a positive whole number"),
        (["--gpus=64", "--price=2"], "add --tokens or --hours"),
        (["--gpus=64", "--write=x.toml"], "add --search"),
        (["--gpus=64", "--world-size=64"], "--world-size cannot be combined with --gpus"),
        (["--device=h100"], "add --gpus N"),
    ],
)
def test_bad_options_of_a_prediction_are_one_sentence(
    large: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", large, *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
