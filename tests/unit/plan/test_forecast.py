"""Predictions of memory and time: exact state, published figures, and what must be monotonic."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.errors import ConfigError
from megacore.pipeline import Costs, build_schedule
from megatrain.config import (
    Config,
    EchoConfig,
    MoEConfig,
    layers_of_stages,
    load_config,
    resolve,
    stages_of_ranks,
)
from megatrain.plan.cost import LayerCosts
from megatrain.plan.device import FOLDER, known_devices, load_device
from megatrain.plan.footprint import (
    GIB,
    footprints,
    in_flight,
    layer_bytes,
    rank_stages,
    slot_bytes,
)
from megatrain.plan.forecast import advise, forecast
from megatrain.plan.layout import train_schedule
from megatrain.plan.link import link
from megatrain.plan.run_plan import plan_run
from megatrain.plan.search import fastest_by_memory, search
from megatrain.plan.spec import ModelSpec, RunSpec
from megatrain.plan.spec_from_config import model_spec, run_spec, settings_of
from megatrain.plan.state import state_bytes
from megatrain.plan.step_time import stage_layers, step_time, time_on_cores

# Llama-3 70B with 12 layers, as measured on 8 B200 by SimuMax v1.2.
LLAMA_12 = ModelSpec(
    num_layers=12,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    padded_vocab_size=128256,
    seq_length=4096,
    moe_layers=(False,) * 12,
)
# GPT-3 175B of Korthikanti et al., arXiv:2205.05198.
GPT_175B = ModelSpec(
    num_layers=96,
    hidden_size=12288,
    ffn_hidden_size=49152,
    num_heads=96,
    num_kv_heads=96,
    head_dim=128,
    padded_vocab_size=51200,
    seq_length=2048,
    tie_embeddings=True,
    gated=False,
    moe_layers=(False,) * 96,
)
MOE = replace(
    LLAMA_12,
    moe=MoEConfig(num_experts=64, top_k=8, ffn_hidden_size=2048, shared_ffn_hidden_size=2048),
    moe_layers=(False, *(True,) * 11),
)


@pytest.mark.parametrize(
    ("layout", "measured_gib", "measured_s"),
    [
        ({"pp": 2, "global_batch": 128}, 66.55, 5.4365),
        ({"tp": 2, "sequence_parallel": True, "global_batch": 128}, 60.68, 5.3765),
        ({"tp": 4, "sequence_parallel": True, "global_batch": 64}, 39.07, 2.9646),
        ({"tp": 8, "sequence_parallel": True, "global_batch": 32}, 28.29, 2.0737),
    ],
)
def test_published_measurements_are_predicted(
    layout: dict[str, int], measured_gib: float, measured_s: float
) -> None:
    spec = RunSpec(gpus=8, loss="fused", **layout)  # type: ignore[arg-type]
    found = forecast(LLAMA_12, spec, load_device("b200"))
    assert found.fullest.allocated / GIB == pytest.approx(measured_gib, rel=0.03)
    assert found.step.seconds == pytest.approx(measured_s, rel=0.15)
    assert found.verdict == "fits"


def test_activations_follow_the_published_formula() -> None:
    spec = RunSpec(gpus=64, tp=8, pp=8, sequence_parallel=True, attention="unfused")
    kept, whole = layer_bytes(GPT_175B, spec, moe=False)
    heads, seq, hidden = 96, 2048, 12288
    published = (34 + 5 * heads * seq / hidden) * hidden / 8
    assert whole == kept == pytest.approx(published, rel=0.01)
    selective = replace(spec, recompute=frozenset({"scores"}))
    assert layer_bytes(GPT_175B, selective, moe=False)[0] == pytest.approx(
        34 * hidden / 8, rel=0.02
    )
    full = replace(spec, recompute=frozenset({"layer"}))
    assert layer_bytes(GPT_175B, full, moe=False)[0] == 2 * hidden / 8


CASES = [
    {
        "model": {
            "hidden_size": 64,
            "num_layers": layers,
            "num_heads": 4,
            "num_kv_heads": 2,
            "vocab_size": 300,
            "num_mtp_layers": mtp,
            "qk_norm": "head" if experts else "none",
            "tie_embeddings": tied,
        },
        "moe": {
            "num_experts": experts,
            "layer_pattern": "d(e)",
            "shared_ffn_hidden_size": 32 * bool(experts),
            "shared_gate": bool(experts),
        },
        "parallel": {"pp": pp, "tp": 2, "ep": 2 if experts else 1, "sequence_parallel": sp},
        "pipeline": {"schedule": schedule},
        "optimizer": {"distributed": bool(sp)},
        "train": {"dtype": "bfloat16" if tied else "float32", "global_batch_size": 64},
    }
    for (schedule, pp, layers), tied, mtp, experts, sp in product(
        (("1f1b", 1, 3), ("1f1b", 4, 9), ("interleaved_1f1b", 2, 8), ("zb_v", 2, 8)),
        (True, False),
        (0, 1),
        (0, 4),
        (True, False),
    )
    if not (schedule == "1f1b" and pp == 4)
] + [
    {
        "model": {"num_layers": 8, "vocab_size": 300},
        "parallel": {"pp": 4},
        "pipeline": {"schedule": "dualpipe"},
        "train": {"global_batch_size": 512},
    }
]
CASES += [
    {
        "model": {"num_layers": 3, "num_heads": 4, "vocab_size": 300, **model},
        "parallel": {"tp": 2, "pp": 1, "sequence_parallel": sp},
        "train": {"global_batch_size": 64},
    }
    for model in (
        {"mla": {"kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6}},
        {"mla": {"kv_rank": 16, "q_rank": 24, "v_head_dim": 32}, "num_mtp_layers": 1},
        {"qkv_bias": True, "output_bias": True, "norm": "layernorm", "sliding_window": 8},
        {"qk_norm": "full", "norm_position": "after"},
    )
    for sp in (True, False)
]
CASES += [
    {
        "model": {"num_layers": 3, "vocab_size": 300, "attention_sinks": True},
        "moe": {"num_experts": 4, "activation": "clamped_swiglu", "biases": True},
        "parallel": {"tp": 2, "ep": 2, "pp": 1, "etp": etp},
        "train": {"global_batch_size": 64},
    }
    for etp in (1, 2)
]


@pytest.mark.parametrize(
    ("schedule", "overlap"), [("gpipe", "false"), ("1f1b", "false"), ("1f1b", "true")]
)
def test_one_pipeline_rank_holds_what_its_schedule_holds(schedule: str, overlap: str) -> None:
    settings = {
        "parallel.ep": "2", "moe.num_experts": "4", "train.global_batch_size": "16",
        "pipeline.schedule": schedule, "pipeline.overlap_moe": overlap,
    }  # fmt: skip
    config = resolve(load_config(None, list(settings.items())), 2, vocab_size=256, cuda=False)
    held = in_flight(run_spec(config, 2), [1.0], [0.0])
    assert held == train_schedule(config, 2).simulate().peak_in_flight


@pytest.mark.parametrize(
    "pipeline",
    [
        *({"schedule": name} for name in ("1f1b", "zb_v", "dualpipe", "auto")),
        {"schedule": "auto", "placement": "v"},
    ],
)
def test_predictions_place_stages_as_runs_do(pipeline: dict[str, str]) -> None:
    sections = {"pipeline": pipeline, "parallel": {"pp": 2}}
    config = resolve(Config(**sections), 2, vocab_size=256, cuda=False)  # type: ignore[arg-type]
    found = rank_stages(run_spec(config, 2))
    of_run = stages_of_ranks(config.pipeline, 2)
    assert [sorted(stages) for stages in found] == [sorted(s) for s in of_run]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        *((name, {"num_chunks": "2", "group_size": size})
          for name in ("interleaved_1f1b", "group_interleaved", "interleaved_zb")
          for size in ("4", "8", "16")),
        ("1f1b", {"overlap_moe": "true"}),
        ("1f1b", {"overlap_moe": "true", "pairs": "split"}),
        ("interleaved_1f1b", {"overlap_moe": "true"}),
        ("dualpipe", {"overlap_moe": "true"}),
        ("auto", {"memory_limit": "2"}),
        ("auto", {"placement": "v", "memory_limit": "5"}),
    ],
)  # fmt: skip
def test_predictions_simulate_the_schedule_of_the_run(
    schedule: str, options: dict[str, str]
) -> None:
    settings = {
        "model.num_layers": "8", "parallel.pp": "4", "parallel.ep": "2", "moe.num_experts": "4",
        "train.global_batch_size": "64", "pipeline.schedule": schedule,
        **{f"pipeline.{name}": text for name, text in options.items()},
    }  # fmt: skip
    config = resolve(load_config(None, list(settings.items())), 8, vocab_size=256, cuda=False)
    model, spec, device = (
        model_spec(config.model, config.moe),
        run_spec(config, 8),
        load_device("h100"),
    )
    predicted, trained = step_time(model, spec, device).schedule, train_schedule(config, 8)
    assert predicted == trained
    # Microbatches that each rank holds, from what it would keep of each of its stages.
    ones = [1.0] * (predicted.num_stages // predicted.num_chains)
    held = in_flight(spec, ones, [0.0] * len(ones))
    assert held == trained.simulate().peak_in_flight


@pytest.mark.parametrize("sections", CASES)
def test_state_bytes_are_those_of_the_buffers(sections: dict[str, dict[str, object]]) -> None:
    gpus = 8 * sections["parallel"]["pp"]  # type: ignore[operator]
    config = resolve(Config(**sections), gpus, vocab_size=256, cuda=False)  # type: ignore[arg-type]
    plan = plan_run(config, gpus)
    assert [(r.param_bytes, r.grad_bytes, r.optimizer_bytes) for r in plan.ranks] == [
        (state["weights"], state["gradients"], state["optimizer"])
        for state in state_bytes(config, gpus)
    ]
    # The shape of the time model leaves out biases, sinks and wide norms.
    small = {"norm", "norm_position", "attention_sinks"}
    if not small & sections["model"].keys():
        assert model_spec(config.model, config.moe).num_params == plan.num_params
    spec = run_spec(config, gpus)
    found = forecast(
        model_spec(config.model, config.moe), spec, load_device("h100"), state_bytes(config, gpus)
    )
    assert len(found.ranks) == len(plan.ranks)
    assert found.step.seconds > 0


layouts = st.builds(
    RunSpec,
    gpus=st.just(64),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 8]),
    microbatch=st.sampled_from([1, 2]),
    global_batch=st.sampled_from([256, 512]),
    schedule=st.sampled_from(["1f1b", "zb_h1", "gpipe"]),
    precision=st.sampled_from(["bf16", "fp8"]),
    overlap=st.sets(st.sampled_from(["grads", "params", "dp", "tp", "pp", "ep"])).map(frozenset),
    dispatcher=st.sampled_from(["alltoall", "deepep", "allgather"]),
)


@settings(max_examples=30, deadline=None)
@given(spec=layouts, model=st.sampled_from([LLAMA_12, MOE]))
def test_parts_add_up_and_choices_move_results_the_right_way(
    spec: RunSpec, model: ModelSpec
) -> None:
    device = load_device("h100")
    base = forecast(model, spec, device)
    assert sum(base.step.parts.values()) == pytest.approx(base.step.seconds)
    assert min(base.step.parts.values()) > -1e-9
    assert all(part >= 0 for rank in base.ranks for part in rank.parts.values())
    assert sum(base.layers) == model.num_layers

    again = forecast(model, replace(spec, recompute=frozenset({"layer"})), device)
    assert again.step.seconds >= base.step.seconds
    assert again.fullest.total <= base.fullest.total
    faster = forecast(model, spec, replace(device, peak_bf16=2 * device.peak_bf16))
    assert faster.step.seconds <= base.step.seconds * 1.0001
    hidden = forecast(model, replace(spec, overlap=spec.overlap | {"dp"}), device)
    assert hidden.step.seconds <= base.step.seconds * 1.0001
    if model is MOE:
        skewed = forecast(model, replace(spec, imbalance=1.5), device)
        assert skewed.step.seconds >= base.step.seconds
        assert skewed.fullest.total >= base.fullest.total


def test_each_overlap_of_data_parallelism_hides_its_part() -> None:
    device = load_device("h100")
    base = RunSpec(gpus=64, global_batch=64)

    def exposed(*overlap: str) -> float:
        return forecast(LLAMA_12, replace(base, overlap=frozenset(overlap)), device).step.parts[
            "dp"
        ]

    assert exposed("dp") < min(exposed("grads"), exposed("params"))
    saved = 2 * exposed() - exposed("grads") - exposed("params")
    assert exposed() - exposed("dp") == pytest.approx(saved)


def test_clones_cost_memory_and_traffic_and_bound_the_load() -> None:
    device = load_device("h100")
    plain = RunSpec(gpus=8, ep=4, tp=2, global_batch=32, imbalance=3.0)
    slots = EchoConfig(num_spare_slots=8)
    cloned = replace(plain, echo=slots)
    without, found = forecast(MOE, plain, device), forecast(MOE, cloned, device)
    numel = 3 * MOE.expert_width * MOE.hidden_size
    assert found.fullest.parts["slots of clones"] == 8 * numel * (2 + 4)
    turns = replace(cloned, overlap=frozenset({"ep"}))
    assert slot_bytes(MOE, replace(turns, etp=2)) == 8 * numel * (2 * 2 + 4) / 2
    # 8 slots for 16 experts: (1 + 1/2)^2 / 2 = 1.125 in place of 3.
    assert cloned.load(MOE.moe.num_experts) == 1.125
    assert found.fullest.parts["activations"] < without.fullest.parts["activations"]
    times, before = found.step.parts, without.step.parts
    assert times["experts"] < before["experts"]
    assert times["ep"] == pytest.approx(before["ep"] * 1.125 / 3)
    assert times["clones"] > 0
    # Balanced routing makes no clones, one rank cannot, and the other planner promises nothing.
    assert "clones" not in before
    balanced = forecast(MOE, replace(cloned, clones_made=False), device)
    assert "clones" not in balanced.step.parts
    assert balanced.fullest.parts["slots of clones"] > 0
    assert replace(cloned, ep=1).slots == 0
    documented = replace(cloned, echo=EchoConfig(num_spare_slots=8, planner="echo"))
    assert documented.load(MOE.moe.num_experts) == 3.0


def test_clones_inside_a_domain_do_not_use_the_network() -> None:
    spec = RunSpec(gpus=16, ep=16, global_batch=32, echo=EchoConfig(num_spare_slots=4))
    inside = replace(spec, echo=EchoConfig(num_spare_slots=4, domain_size=8))
    device = load_device("h100")
    times = [forecast(MOE, each, device).step.parts["clones"] for each in (spec, inside)]
    assert times[1] < 0.5 * times[0]


def test_a_search_keeps_the_domain_of_clones() -> None:
    base = RunSpec(gpus=16, global_batch=32, echo=EchoConfig(num_spare_slots=2, domain_size=8))
    found = search(MOE, base, load_device("b300"), simulate=40)
    assert {each.spec.ep for each in found.best} <= {8, 16}


def test_gathered_keys_and_values_are_kept_whole_and_a_ring_keeps_its_own() -> None:
    spec = RunSpec(gpus=8, cp=4, tp=2)
    kept, passing = {}, {}
    for comm in ("allgather", "a2a", "ring"):
        kept[comm], whole = layer_bytes(LLAMA_12, replace(spec, cp_comm=comm), False)
        passing[comm] = whole - kept[comm]
    own = 2 * 2 * LLAMA_12.num_kv_heads * LLAMA_12.head_dim / 2  # keys and values, 2 bytes, tp 2
    assert kept["allgather"] - kept["ring"] == pytest.approx(3 * own)
    assert kept["a2a"] == kept["ring"] == layer_bytes(LLAMA_12, replace(spec, cp=1), False)[0]
    assert passing["ring"] == pytest.approx(2 * own + 2 * 2 * own)  # blocks, gradients in fp32


def test_pipeline_time_is_the_simulated_one() -> None:
    spec = RunSpec(gpus=4, pp=4, global_batch=8, overlap=frozenset({"pp"}))
    device = load_device("h100")
    step = step_time(LLAMA_12, spec, device)
    timeline = step.timeline()
    once = sum(step.parts[kind] for kind in ("dp", "optimizer", "host_step"))
    assert step.seconds == pytest.approx(timeline.makespan + once)


def test_uneven_layers_leave_room_for_the_output_layer() -> None:
    model = replace(LLAMA_12, num_layers=30, moe_layers=(False,) * 30)
    spec = RunSpec(gpus=4, pp=4)
    layers = stage_layers(model, spec, LayerCosts(model, spec, load_device("h100")))
    assert sum(layers) == 30
    assert layers[-1] == min(layers)


def test_groups_across_nodes_use_the_network() -> None:
    device = load_device("h100")
    inside, across = link(device, 8, 1), link(device, 16, 1)
    assert (inside.nodes, across.nodes) == (1, 2)
    alone = link(device, 16, 8)  # one rank, and so one network interface, on each node
    assert alone.bandwidth < across.bandwidth <= inside.bandwidth
    assert inside.ring(1e6) < across.ring(1e6) < alone.ring(1e6)
    assert link(load_device("gb200"), 64, 1).nodes == 1


def test_advice_makes_a_run_fit_that_does_not() -> None:
    model = replace(LLAMA_12, num_layers=48, moe_layers=(False,) * 48)
    spec = RunSpec(gpus=16, tp=8, sequence_parallel=True, global_batch=16, microbatch=4)
    base = forecast(model, spec, load_device("h100"))
    assert base.verdict == "does not fit"
    advice = advise(base)
    assert advice[0].forecast.fullest.total < base.fullest.total
    assert "GiB" in advice[0].text


def test_search_returns_layouts_that_fit_and_beats_a_given_one() -> None:
    device = load_device("h100")
    base = RunSpec(gpus=64, tp=8, sequence_parallel=True, global_batch=128)
    found = search(LLAMA_12, base, device, simulate=40)
    assert found.tried > 500
    assert {each.verdict for each in found.best} == {"fits"}
    given_time = forecast(LLAMA_12, replace(base, overlap=frozenset({"dp"})), device).step.seconds
    assert found.best[0].step.seconds <= given_time
    front = fastest_by_memory(found.best)
    assert [each.fullest.total for each in front] == sorted(
        (each.fullest.total for each in front), reverse=True
    )


def test_search_finds_uneven_pipelines_and_writes_them() -> None:
    # 61 layers, as of DeepSeek-V3: even stages exist for 2, 3, 7, 9 and so on ranks only.
    model = replace(LLAMA_12, num_layers=61, moe_layers=(False,) * 61)
    base = RunSpec(gpus=256, global_batch=256)
    best = search(model, base, load_device("h100"), simulate=60).best[0]
    assert best.spec.pp > 2
    assert sum(best.layers) == 61
    assert len(set(best.layers)) > 1
    pipeline = settings_of(best.spec, best.layers)["pipeline"]
    config = Config(
        model={"num_layers": 61}, parallel={"pp": best.spec.pp}, pipeline=_given(pipeline)
    )
    assert tuple(map(len, layers_of_stages(config))) == best.layers


def _given(settings: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in settings.items() if value is not None}


def test_at_most_forty_constants_were_fitted() -> None:
    files = [tomllib.loads(path.read_text()) for path in FOLDER.glob("*.toml")]
    assert 0 < sum(len(file["id"].get("fitted", ())) for file in files) <= 40


@pytest.mark.parametrize("name", known_devices())
def test_every_calibration_is_complete(name: str) -> None:
    device = load_device(name)
    assert device.peak_bf16 > 0
    assert device.sources
    assert footprints(LLAMA_12, RunSpec(gpus=8, pp=2), device, (6, 6))


def test_bad_calibrations_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"device must be one of .*did you mean h100"):
        load_device("h10")
    with pytest.raises(ConfigError, match=r"nowhere.toml: no such calibration file"):
        load_device("nowhere.toml")


def test_split_backward_passes_compute_blocks_of_logits_twice() -> None:
    wide, narrow = (replace(LLAMA_12, padded_vocab_size=vocab) for vocab in (1 << 20, 1 << 10))
    spec = RunSpec(gpus=2, pp=2, global_batch=8, plain_autograd=True)
    device = load_device("h100")
    for model in (wide, narrow):
        layers = LayerCosts(model, spec, device)
        heads = [
            step_time(model, replace(spec, schedule=name), device).stages[-1].parts["head"]
            for name in ("1f1b", "zb_h1")
        ]
        assert heads[1] - heads[0] == pytest.approx(layers.logits_again)
        assert (layers.logits_again > 0) == (model is wide)


def test_ranks_that_share_cores_are_slow_only_while_many_of_them_compute() -> None:
    timeline = build_schedule("gpipe", num_ranks=4, num_microbatches=4).simulate(
        Costs(forward=1.0, backward_input=1.0, backward_weight=0.0, send=0.0)
    )
    assert timeline.makespan == 14
    # In both passes 1, 2, 3, 4, 3, 2 and 1 ranks compute at a time.
    assert time_on_cores(timeline, 1 / 4) == 14
    assert time_on_cores(timeline, 1 / 2) == 2 * (1 + 1 + 1.5 + 2 + 1.5 + 1 + 1)
    assert time_on_cores(timeline, 1) == 32


def test_a_step_of_more_ranks_than_cores_takes_longer() -> None:
    spec = RunSpec(gpus=4, pp=4, microbatch=1, global_batch=4, schedule="gpipe")
    device = load_device("h100")
    one, two, four, any_number = (
        step_time(LLAMA_12, spec, replace(device, peak_at_once=cores)).seconds
        for cores in (1, 2, 4, 0)
    )
    assert one > two > four == any_number


def test_muon_is_predicted_with_its_bytes_and_products() -> None:
    sections = {
        "model": {"num_layers": 8, "hidden_size": 1024, "num_heads": 8, "vocab_size": 32000},
        "train": {"dtype": "bfloat16", "global_batch_size": 32},
    }
    forecasts = []
    for name in ("adamw", "muon"):
        config = resolve(
            Config(**sections, optimizer={"name": name}), 8, vocab_size=32000, cuda=True
        )
        model, spec = model_spec(config.model, config.moe), run_spec(config, 8)
        found = step_time(model, spec, load_device("h100"))
        [state] = state_bytes(config, 8)
        forecasts.append((spec.state_bytes, state["optimizer"], found.parts["optimizer"]))
    (per_param, owned, time), (less, fewer, longer) = forecasts
    assert per_param == 12
    assert 8 < less < 12
    assert fewer / owned == pytest.approx(less / per_param, rel=0.01)
    assert longer > time
