from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import ConfigError
from megatrain.config import Config, ModelConfig, load_config, resolve
from megatrain.config.graph_rules import graph_scopes
from megatrain.config.moe import EchoConfig
from megatrain.models.shape import GPTShape


def make(**settings: str) -> Config:
    """A configuration from ``section__key="value"`` overrides."""
    return load_config(None, [(key.replace("__", "."), text) for key, text in settings.items()])


def message_of(config: Config, world_size: int) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(config, world_size, vocab_size=256, cuda=False)
    return str(caught.value)


def test_every_derived_setting_is_filled() -> None:
    config = resolve(make(parallel__tp="2", run__dir="runs/x"), 4, vocab_size=300, cuda=False)
    assert config.model.num_kv_heads == 4
    assert config.model.ffn_hidden_size == 384
    assert config.model.vocab_size == 300
    assert config.parallel.etp == 2
    assert config.optimizer.min_lr == pytest.approx(3e-4)
    assert config.run.dir == "runs/x"
    assert config.checkpoint.dir == "runs/x/checkpoints"
    assert (config.run.nproc, config.run.backend, config.debug.trace_step) == (4, "gloo", 50)


@pytest.mark.parametrize("cuda", [False, True])
def test_messages_between_stages_overlap(cuda: bool) -> None:
    assert resolve(make(), 1, vocab_size=256, cuda=cuda).pipeline.overlap_p2p is True
    given = make(pipeline__overlap_p2p="false")
    assert resolve(given, 1, vocab_size=256, cuda=cuda).pipeline.overlap_p2p is False


@pytest.mark.parametrize(("hidden", "ffn"), [(64, 192), (96, 256), (128, 384), (256, 704)])
def test_ffn_width_is_eight_thirds_rounded_up_to_64(hidden: int, ffn: int) -> None:
    config = resolve(make(model__hidden_size=str(hidden)), 1, vocab_size=256, cuda=False)
    assert config.model.ffn_hidden_size == ffn


def test_set_values_are_kept() -> None:
    config = make(
        model__vocab_size="100",
        optimizer__min_lr="0",
        run__dir="d",
        checkpoint__dir="c",
        run__backend="gloo",
        optimizer__schedule="wsd",
    )
    config = resolve(config, 1, vocab_size=256, cuda=True)
    assert (config.model.vocab_size, config.optimizer.min_lr) == (100, 0.0)
    assert (config.run.dir, config.checkpoint.dir, config.run.backend) == ("d", "c", "gloo")


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(make(parallel__pp="2"), 4, vocab_size=256, cuda=False)
    assert resolve(once, 4, vocab_size=256, cuda=True) == once


def test_a_tokenizer_is_loaded_once_and_only_if_all_rules_hold() -> None:
    loaded = []

    def vocab_size() -> int:
        loaded.append("tokenizer")
        return 300

    with pytest.raises(ConfigError, match="does not fit 3 processes"):
        resolve(make(parallel__tp="2"), 3, vocab_size=vocab_size, cuda=False)
    assert not loaded
    config = resolve(make(parallel__tp="2"), 4, vocab_size=vocab_size, cuda=False)
    assert (config.model.vocab_size, loaded) == (300, ["tokenizer"])
    assert config == resolve(make(parallel__tp="2"), 4, vocab_size=300, cuda=False)


def test_backend_follows_the_gpu() -> None:
    assert resolve(make(), 1, vocab_size=256, cuda=True).run.backend == "nccl"
    assert resolve(make(), 1, vocab_size=256, cuda=False).run.backend == "gloo"


def test_layout_message_shows_factors_origins_and_fixes() -> None:
    message = message_of(make(parallel__tp="4", parallel__pp="4"), 12)
    assert message == (
        "the layout does not fit 12 processes (--nproc): tp 4 (--parallel.tp=4) x cp 1 (default) x "
        "pp 4 (--parallel.pp=4) = 16, and 12 is not a multiple of it; nearest: start 16 processes"
    )


@given(
    world=st.integers(1, 24),
    sizes=st.fixed_dictionaries(
        {axis: st.sampled_from([1, 2, 3, 4]) for axis in ("tp", "pp", "cp", "ep")}
    ),
    experts=st.sampled_from([4, 6, 8]),
    layers=st.sampled_from([4, 6, 12]),
    batch=st.sampled_from([48, 96, 64]),
)
def test_every_layout_in_a_message_is_accepted(
    world: int, sizes: dict[str, int], experts: int, layers: int, batch: int
) -> None:
    settings = {f"parallel__{axis}": str(size) for axis, size in sizes.items()}
    settings |= {
        "moe__num_experts": str(experts),
        "model__num_layers": str(layers),
        "train__global_batch_size": str(batch),
        "train__microbatch_size": "1",
        "model__num_heads": "12",
        "model__hidden_size": "48",
    }
    try:
        resolve(make(**settings), world, vocab_size=256, cuda=False)
    except ConfigError as error:
        nearest = re.search(r"is not a multiple of it; nearest: (.*)", str(error))
    else:
        return
    for fix in nearest[1].split(", or ") if nearest else ():
        changed = dict(settings)
        for axis, values in re.findall(r"(tp|pp|ep)=(\d+(?: or \d+)*)", fix):
            changed[f"parallel__{axis}"] = values.partition(" or ")[0]
        counts = re.match(r"start ([\d or]+) processes", fix)
        for count in counts[1].split(" or ") if counts else [str(world)]:
            resolve(make(**changed), int(count), vocab_size=256, cuda=False)


@pytest.mark.parametrize(
    ("settings", "world", "fixes"),
    [
        # tp=4 pp=3 and tp=1 pp=4 would fit 12 processes, but not the layers or the batch.
        ({"tp": "4", "pp": "4"}, 12, "nearest: start 16 processes"),
        (
            {"tp": "4", "pp": "4"},
            8,
            "nearest: start 16 processes, or use tp=2 pp=4, or use tp=4 pp=2",
        ),
        ({"tp": "4", "pp": "7"}, 12, "start 28 processes, and change what does not fit them"),
    ],
)
def test_layouts_that_other_rules_refuse_are_not_suggested(
    settings: dict[str, str], world: int, fixes: str
) -> None:
    message = message_of(make(**{f"parallel__{key}": v for key, v in settings.items()}), world)
    assert f"is not a multiple of it; {fixes}" in message


@pytest.mark.parametrize(
    ("settings", "world", "expected"),
    [
        (
            {"parallel__cp": "2", "model__seq_length": "18"},
            2,
            "model.seq_length = 18 (--model.seq_length=18) is not a multiple of 2 * parallel.cp = "
            "2 (--parallel.cp=2) = 4, the slices of a sequence; nearest seq_length: 16 or 20",
        ),
        (
            {"parallel__cp": "2", "parallel__cp_comm": "a2a", "model__num_kv_heads": "1"},
            2,
            "parallel.cp_comm = a2a (--parallel.cp_comm=a2a) needs num_kv_heads to be a multiple "
            "of parallel.tp = 1 (default) * parallel.cp = 2 (--parallel.cp=2) = 2, got "
            'model.num_kv_heads = 1 (--model.num_kv_heads=1); set cp_comm = "allgather"',
        ),
        (
            {"parallel__cp": "2", "parallel__cp_comm": "a2a", "model__mla__kv_rank": "8"},
            2,
            "parallel.cp_comm = a2a (--parallel.cp_comm=a2a) exchanges heads of keys, but "
            "model.mla.kv_rank = 8 (--model.mla.kv_rank=8) gathers narrower latents; "
            'set cp_comm = "allgather"',
        ),
        (
            {"parallel__cp": "2", "parallel__cp_comm": "ring", "model__mla__kv_rank": "8"},
            2,
            "parallel.cp_comm = ring (--parallel.cp_comm=ring) exchanges heads of keys, but "
            "model.mla.kv_rank = 8 (--model.mla.kv_rank=8) gathers narrower latents; "
            'set cp_comm = "allgather"',
        ),
        (
            {"parallel__ep": "2"},
            2,
            "parallel.ep = 2 (--parallel.ep=2) is for experts, but moe.num_experts = 0 (default); "
            "leave ep out, or set num_experts",
        ),
        ({"parallel__etp": "2"}, 2, "parallel.etp = 2 (--parallel.etp=2) is for experts"),
        (
            {"moe__num_experts": "6", "parallel__ep": "4"},
            4,
            "moe.num_experts = 6 (--moe.num_experts=6) is not a multiple of parallel.ep = 4 "
            "(--parallel.ep=4); nearest: ep=3 or 6, or num_experts=4 or 8",
        ),
        (
            {"moe__num_experts": "4", "parallel__ep": "4", "parallel__etp": "2"},
            4,
            "the experts do not fit 4 processes (--nproc): parallel.etp = 2 (--parallel.etp=2) x "
            "parallel.ep = 4 (--parallel.ep=4) x parallel.pp = 1 (default) = 8, and 4 is not a "
            "multiple of it; nearest: ep=2, or start 8 processes",
        ),
        (
            {"moe__num_experts": "4", "parallel__ep": "4", "optimizer__num_instances": "2"},
            4,
            "optimizer.num_instances = 2 (--optimizer.num_instances=2) does not divide 1, the "
            "number of ranks that hold the same parameters (edp 1); nearest: 1",
        ),
        (
            {
                "parallel__pp": "2",
                "pipeline__schedule": "dualpipe",
                "optimizer__num_instances": "3",
            },
            4,
            "optimizer.num_instances = 3 (--optimizer.num_instances=3) does not divide 4, the "
            "number of ranks that hold the same parameters (dp 2 x 2 copies of the model); "
            "nearest: 2 or 4",
        ),
        (
            {"debug__trace_step": "50", "train__steps": "2"},
            1,
            "debug.trace_step must be 1 to 2, a step of train.steps = 2 (--train.steps=2), or -1 "
            "for no timeline, got debug.trace_step = 50 (--debug.trace_step=50)",
        ),
        (
            {
                "train__fp8": "blockwise",
                "moe__num_experts": "4",
                "moe__echo__num_spare_slots": "1",
                "parallel__ep": "2",
            },
            2,
            'train.fp8 must be "off" where experts have clones (moe.echo.num_spare_slots = 1 '
            "(--moe.echo.num_spare_slots=1)), got train.fp8 = blockwise (--train.fp8=blockwise); "
            "set one of them to its default",
        ),
        (
            {"moe__num_experts": "4", "moe__layer_pattern": "d"},
            1,
            "moe.num_experts = 4 (--moe.num_experts=4), but none of the 4 layers has experts",
        ),
        (
            {"moe__num_experts": "4", "parallel__tp": "2", "model__seq_length": "15"},
            2,
            "model.seq_length = 15 (--model.seq_length=15) is not a multiple of parallel.tp = 2 "
            "(--parallel.tp=2): the ranks of tp share the tokens that they route; nearest: 14 or "
            "16",
        ),
        (
            {
                "moe__num_experts": "4",
                "parallel__tp": "2",
                "parallel__cp": "2",
                "model__seq_length": "12",
            },
            4,
            "model.seq_length = 12 (--model.seq_length=12) is not a multiple of parallel.tp = 2 "
            "(--parallel.tp=2) * 2 * parallel.cp = 2 (--parallel.cp=2) = 8: the ranks of tp share "
            "the tokens that they route; nearest: 8 or 16",
        ),
        (
            {"parallel__tp": "8"},
            8,
            "model.num_heads = 4 (default) is not a multiple of parallel.tp = 8 (--parallel.tp=8); "
            "nearest: tp=4, or num_heads=8",
        ),
        (
            {"parallel__tp": "2", "model__num_kv_heads": "1"},
            2,
            "model.num_kv_heads = 1 (--model.num_kv_heads=1) is not a multiple of parallel.tp = 2",
        ),
        (
            {"parallel__tp": "2", "parallel__sequence_parallel": "true", "model__seq_length": "9"},
            2,
            "nearest: tp=1 or 3, or seq_length=8 or 10",
        ),
        ({"parallel__tp": "2", "model__ffn_hidden_size": "99"}, 2, "ffn_hidden_size=98 or 100"),
        ({"parallel__pp": "8"}, 8, "model.num_layers = 4 (default) cannot fill the 8 stages"),
        (
            {"pipeline__num_chunks": "2"},
            1,
            "pipeline.num_chunks = 2 (--pipeline.num_chunks=2) does not fit pipeline.schedule = "
            "1f1b (default), which has 1; leave num_chunks out, or use one of no_pipelining, "
            "interleaved_1f1b, looped_bfs",
        ),
        (
            {"pipeline__schedule": "zb_v", "pipeline__num_chunks": "1"},
            1,
            "does not fit pipeline.schedule = zb_v (--pipeline.schedule=zb_v), which has 2",
        ),
        (
            {"pipeline__schedule": "interleaved_1f1b", "pipeline__num_chunks": "1"},
            1,
            "needs pipeline.num_chunks > 1",
        ),
        (
            {"pipeline__schedule": "dualpipe", "pipeline__num_chunks": "1"},
            1,
            "does not fit pipeline.schedule = dualpipe (--pipeline.schedule=dualpipe), which has 2",
        ),
        (
            {"pipeline__schedule": "dualpipe", "parallel__pp": "8"},
            8,
            "cannot fill the 8 stages of parallel.pp = 8 (--parallel.pp=8) x pipeline.num_chunks = "
            "2 (default) / 2 copies of the model; use at least 8 layers, or at most 4 stages",
        ),
        (
            {"pipeline__schedule": "no_pipelining", "parallel__pp": "2"},
            2,
            "runs on one pipeline rank, but parallel.pp = 2",
        ),
        ({"pipeline__memory_limit": "3"}, 1, "is for the schedule auto, but pipeline"),
        (
            {"pipeline__schedule": "auto", "pipeline__placement": "v", "pipeline__num_chunks": "3"},
            1,
            "does not fit pipeline.schedule = auto (--pipeline.schedule=auto), which has 2",
        ),
        (
            {"train__global_batch_size": "30"},
            2,
            "train.global_batch_size = 30 (--train.global_batch_size=30) is not a multiple of "
            "train.microbatch_size = 4 (default) x dp 2 (2 processes / tp*cp*pp) = 8; "
            "nearest: 24 or 32",
        ),
        ({"pipeline__group_size": "2"}, 1, "group_size = 2 (--pipeline.group_size=2) needs"),
        (
            {"model__num_layers": "5", "parallel__pp": "2"},
            2,
            "model.num_layers = 5 (--model.num_layers=5) cannot be dealt to pipeline stages with "
            "parallel.pp = 2 (--parallel.pp=2), of which each holds equally many; nearest, "
            "changing one setting: --model.num_layers=4 or 6, or --parallel.pp=1, or "
            "--pipeline.layout='Et*2|t*3L'",
        ),
        (
            {"optimizer__warmup": "20", "optimizer__decay_end": "20"},
            1,
            "optimizer.decay_end = 20 (--optimizer.decay_end=20) is not above "
            "optimizer.warmup = 20 (--optimizer.warmup=20)",
        ),
        (
            {
                "optimizer__schedule": "wsd",
                "optimizer__warmup": "90",
                "optimizer__tail_length": "11",
            },
            1,
            "is more than train.steps = 100 (default); use a tail of at most 10 steps",
        ),
        (
            {
                "optimizer__schedule": "wsd",
                "optimizer__schedule_unit": "samples",
                "optimizer__warmup": "90",
                "optimizer__tail_length": "3111",
            },
            1,
            "use a tail of at most 3110 samples",
        ),
        ({"parallel__order": "tp-pp"}, 2, "leaves out dp, which has size 2"),
    ],
)
def test_a_broken_rule_shows_values_origins_and_the_nearest_fix(
    settings: dict[str, str], world: int, expected: str
) -> None:
    assert expected in message_of(make(**settings), world)


def test_suggested_instances_divide_the_holders_of_dense_and_expert_parameters() -> None:
    settings = {"moe__num_experts": "4", "parallel__ep": "2"}
    batch = {"train__global_batch_size": "48"}
    message = message_of(make(**settings, **batch, optimizer__num_instances="5"), 12)
    lines = message.splitlines()[1:]
    assert ["(dp 12)" in lines[0], "(edp 6)" in lines[1]] == [True, True]
    for line in lines:
        assert line.endswith("; nearest: 3 or 6")
    for count in ("3", "6"):
        resolve(
            make(**settings, **batch, optimizer__num_instances=count),
            12,
            vocab_size=256,
            cuda=False,
        )


@pytest.mark.parametrize("settings", [("5", "2", "1"), ("14", "4", "2"), ("7", "3", "1")])
def test_a_suggested_layout_does_work(settings: tuple[str, str, str]) -> None:
    layers, pp, chunks = settings
    base = {"model__num_layers": layers, "parallel__pp": pp, "pipeline__num_chunks": chunks}
    if chunks != "1":
        base["pipeline__schedule"] = "interleaved_1f1b"
    message = message_of(make(**base, train__global_batch_size="48"), 12)
    layout = message.rpartition("--pipeline.layout=")[2].strip("'")
    resolve(
        make(**base, train__global_batch_size="48", pipeline__layout=layout),
        12,
        vocab_size=256,
        cuda=False,
    )


def test_all_broken_rules_are_told_at_once() -> None:
    config = make(parallel__tp="3", pipeline__num_chunks="2", pipeline__group_size="2")
    lines = message_of(config, 4).splitlines()
    assert lines[0] == f"{len(lines) - 1} problems in the configuration:"
    assert len(lines) >= 5


def test_slices_of_a_sequence_are_one_problem_with_experts_too() -> None:
    config = make(moe__num_experts="4", parallel__cp="2", model__seq_length="18")
    (line,) = message_of(config, 2).splitlines()
    assert "the slices of a sequence" in line


def test_a_run_may_be_shorter_than_its_warmup() -> None:
    resolve(make(optimizer__warmup="50", train__steps="5"), 1, vocab_size=256, cuda=False)


def test_expert_tensor_size_may_be_one_without_experts() -> None:
    assert (
        resolve(
            make(parallel__tp="2", parallel__etp="1"), 2, vocab_size=256, cuda=False
        ).parallel.etp
        == 1
    )


def test_microbatches_follow_from_the_layout() -> None:
    config = resolve(
        make(parallel__tp="2", train__global_batch_size="32"), 4, vocab_size=256, cuda=False
    )
    assert (config.dp(4), config.num_microbatches(4)) == (2, 4)


def test_sizes_need_no_resolved_section_but_the_vocabulary() -> None:
    shape = GPTShape.from_config(ModelConfig(num_heads=8, vocab_size=300))
    resolved = resolve(make(model__num_heads="8"), 1, vocab_size=300, cuda=False).model
    assert shape == GPTShape.from_config(resolved)
    with pytest.raises(ConfigError, match=r"model\.vocab_size must be set"):
        GPTShape.from_config(ModelConfig())


def test_exchanges_of_experts_are_hidden_in_pairs_only() -> None:
    on = {"parallel__pp": "2", "pipeline__overlap_moe": "true"}
    message = message_of(make(**on, pipeline__schedule="zb_v"), 2)
    assert "use 1f1b, interleaved_1f1b, dualpipe_v or dualpipe, or turn it off" in message
    for schedule in ("dualpipe", "dualpipe_v"):
        on["pipeline__schedule"] = schedule
        assert "but moe.num_experts = 0 (default); turn it off" in message_of(make(**on), 2)
    on |= {"moe__num_experts": "4", "parallel__ep": "2", "moe__dispatcher": "allgather"}
    assert "use alltoall or static, or turn it off" in message_of(make(**on), 4)
    on["moe__dispatcher"] = "alltoall"
    config = make(**on)
    clones = EchoConfig(num_spare_slots=1)
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"echo": clones})})
    assert resolve(config, 4, vocab_size=256, cuda=False).pipeline.overlap_moe, (
        "each microbatch has its own slots"
    )
    for moe in ({}, {"moe": config.moe}):
        graphs = make(**on, graphs__mode="partial", graphs__scopes="attn").model_copy(update=moe)
        assert 'set mode = "off", or turn it off' in message_of(graphs, 4)
    # Gradients of weights fill exchanges in pairs, which have I for that.
    split = {**on, "pipeline__pairs": "split"}
    message = message_of(make(**split), 4)
    assert "schedules 1f1b, interleaved_1f1b, but pipeline.schedule = " in message
    split["pipeline__schedule"] = "interleaved_1f1b"
    resolved = resolve(make(**split), 4, vocab_size=256, cuda=False)
    assert resolved.pipeline.requested_pairs == "split"


def test_parts_to_recompute_must_exist() -> None:
    for settings, sentence in (
        (
            {"train__recompute": "norm,layernorm"},
            "train.recompute, entry 2 = \"layernorm\": expected one of 'full', 'selective', 'norm'",
        ),
        ({"train__recompute": "full,norm"}, "recompute names full, which is all of a layer"),
        ({"train__recompute_keep": "1"}, "recompute_keep = 1 exempts microbatches"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            make(**settings)
    config = make(train__recompute="norm,moe")
    assert 'train.recompute = ["norm", "moe"] (--train.recompute=norm,moe)' in message_of(config, 1)
    assert "names moe, but the model has no experts" in message_of(config, 1)


def test_stages_of_a_wrong_number_of_chunks_are_no_second_problem() -> None:
    settings = {"pipeline__schedule": "zb_v", "pipeline__num_chunks": "1", "parallel__pp": "2"}
    assert message_of(make(**settings), 2).count("pipeline.num_chunks = 1") == 1
    assert "cannot be dealt" not in message_of(make(**settings), 2)


CAPTURED = {
    "moe__num_experts": "4",
    "moe__dispatcher": "static",
    "graphs__mode": "full",
    "train__dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"train__dtype": "float32"}, "captures the experts, which needs a grouped kernel, and"),
        ({"moe__ffn_hidden_size": "36"}, "moe.ffn_hidden_size / etp must be a multiple of 8 where"),
        (
            {"graphs__mode": "partial", "graphs__scopes": "moe", "train__dtype": "float32"},
            'graphs.scopes = ["moe"] (--graphs.scopes=moe) captures the experts',
        ),
    ],
)
def test_captured_experts_need_a_grouped_kernel_on_gpus(
    settings: dict[str, str], expected: str
) -> None:
    config = make(**{**CAPTURED, **settings})
    with pytest.raises(ConfigError, match=re.escape(expected)):
        resolve(config, 1, vocab_size=256, cuda=True)
    resolve(config, 1, vocab_size=256, cuda=False)
    resolve(make(**CAPTURED), 1, vocab_size=256, cuda=True)


def test_graphs_and_clones_that_do_not_go_together() -> None:
    clones = {
        "moe__num_experts": "4",
        "moe__dispatcher": "static",
        "moe__echo__num_spare_slots": "1",
        "parallel__ep": "2",
    }
    by_collectives = clones | {
        "graphs__mode": "partial",
        "graphs__scopes": "attn,moe",
        "moe__static_transport": "collective",
    }
    assert "lets the host send clones" in message_of(make(**by_collectives), 2)
    parts = clones | {"graphs__mode": "partial", "graphs__scopes": "moe_router,moe_preprocess"}
    assert "go by more of the plan than what it leaves behind" in message_of(make(**parts), 2)
    # With one rank of experts, slots stay empty.
    alone = parts | {"parallel__ep": "1"}
    resolve(make(**alone), 2, vocab_size=256, cuda=False)


def test_partial_graphs_capture_all_that_needs_no_host() -> None:
    experts = {"moe__num_experts": "4", "moe__layer_pattern": "de"}
    clones = {**experts, "moe__echo__num_spare_slots": "1", "parallel__ep": "2"}
    for settings, expected in (
        ({}, "attn,mlp"),
        (experts, "attn,mlp,moe_router,moe_preprocess"),
        (clones, "attn,mlp,moe_router"),
        ({"data__document_mask": "true"}, "mlp"),
    ):
        config = resolve(make(**settings, graphs__mode="partial"), 2, vocab_size=256, cuda=False)
        assert ",".join(graph_scopes(config)) == expected
        assert config.graphs.mode == "partial"  # saved as it was set


def test_graphs_of_clone_plans_need_peer_memory() -> None:
    clones = {**CAPTURED, "moe__echo__num_spare_slots": "1", "parallel__ep": "2"}
    captured = resolve(make(**clones), 2, vocab_size=256, cuda=True)
    assert captured.moe.static_transport == "peer"
    assert "moe.static_transport" in captured.derived
    eager = resolve(make(**{**clones, "graphs__mode": "off"}), 2, vocab_size=256, cuda=True)
    assert eager.moe.static_transport == "auto"
