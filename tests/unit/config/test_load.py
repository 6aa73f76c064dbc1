from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import ConfigError
from megatrain.config import (
    Config,
    config_to_toml,
    load_config,
    resolve,
    split_overrides,
)
from megatrain.config.load import setting_homes
from megatrain.config.other_names import ELSEWHERE
from megatrain.config.pipeline import SCHEDULES
from megatrain.config.sections import section_classes
from megatrain.config.toml_file import key_lines


def write(folder: Path, text: str, name: str = "demo.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message_of(path: Path | None, overrides: list[tuple[str, str]] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides or [])
    return str(caught.value)


def test_file_and_overrides_are_typed_and_the_override_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "[model]\nnum_layers = 6\nrope_base = 500\n[parallel]\ntp = 2\n")
    config = load_config(
        path,
        [
            ("parallel.tp", "4"),
            ("optimizer.lr", "1e-3"),
            ("run.plain", "true"),
            ("run.dir", "7"),
            ("parallel.sequence-parallel", "yes"),
        ],
    )
    assert (config.model.num_layers, config.model.rope_base) == (6, 500.0)
    assert (config.parallel.tp, config.parallel.sequence_parallel) == (4, True)
    assert (config.optimizer.lr, config.run.plain, config.run.dir) == (1e-3, True, "7")


def test_short_names_of_number_formats_are_known(tmp_path: Path) -> None:
    text = '[optimizer]\nname = "muon"\ngrad_dtype = "fp32"\nmuon.precision = "bf16"\n'
    optimizer = load_config(write(tmp_path, text)).optimizer
    assert (optimizer.grad_dtype, optimizer.muon.precision) == ("float32", "bfloat16")


def test_rates_of_muon_count_only_where_it_is_used(tmp_path: Path) -> None:
    text = "[optimizer]\nlr = 0.0\nmin_lr = 0.0\nmuon.adamw_lr = 1e-3\n"
    assert load_config(write(tmp_path, text)).optimizer.lr == 0.0
    group = '[[optimizer.groups]]\npattern = "layers.*"\noptimizer = "muon"\n'
    assert "multiple of lr, which is 0" in message_of(write(tmp_path, text + group))


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("torch.optim:Adafactor", "factory must return an element-wise optimizer"),
        ("builtins:list", "factory must return a torch.optim.Optimizer, got list"),
        ("torch.optim:LBFGS", "a trial ended with TypeError"),
    ],
)
def test_a_fault_of_an_optimizer_of_ones_own_names_the_setting(factory: str, problem: str) -> None:
    config = load_config(None, [("optimizer.factory", factory)])
    with pytest.raises(ConfigError) as caught:
        config.optimizer.rule()
    assert str(caught.value).startswith(f'optimizer.factory = "{factory}": factory must return')
    assert problem in str(caught.value)


def test_none_empties_an_optional_setting_only(tmp_path: Path) -> None:
    path = write(tmp_path, '[checkpoint]\nresume = "auto"\n')
    assert load_config(path, [("checkpoint.resume", "none")]).checkpoint.resume is None
    assert "expected a whole number" in message_of(path, [("train.steps", "none")])


def test_all_mistakes_are_told_at_once_with_their_places(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[model]\nnum_layers = "four"\n\n[parallel]\ntpp = 2\n[optimizer]\nlr = -1.0\n'
        '[pipeline]\nschedule = "1f1bb"\n',
    )
    message = message_of(path, [("train.stepz", "3"), ("train.seed", "x")])
    assert message.splitlines() == [
        "6 problems in the configuration:",
        f'  {path}:2: model.num_layers = "four": expected a whole number',
        f"  {path}:5: unknown key parallel.tpp; did you mean parallel.tp?",
        f'  {path}:9: pipeline.schedule = "1f1bb": expected one of '
        f"{', '.join(map(repr, SCHEDULES[:-1]))} or {SCHEDULES[-1]!r}; did you mean 1f1b?",
        f"  {path}:7: optimizer.lr = -1.0: must be at least 0",
        '  --train.seed=x: train.seed = "x": expected a whole number',
        "  --train.stepz=3: unknown key train.stepz; did you mean train.steps?",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[modle]\nx = 1\n", ":1: unknown section [modle]; did you mean [model]?"),
        (
            "[zzz]\nx = 1\n",
            ":1: unknown section [zzz]; the sections are model, model.rope_scaling, "
            "model.query_scaling, model.mla",
        ),
        (
            '[train]\ndtype = "FP8"\n',
            ":2: train.dtype = \"FP8\": expected one of 'float32', 'bfloat16' or 'float16'; "
            'operands of 8 bits are train.fp8 = "blockwise", beside train.dtype = "bfloat16"',
        ),
        ("lr = 1\n", ":1: lr stands outside any section; did you mean optimizer.lr?"),
        ("[train]\nlr = 1\n", ":2: unknown key train.lr; did you mean optimizer.lr?"),
        ("model = 3\n", ":1: [model] must be a table of settings, but it is 3"),
        ("[train]\nzzzz = 1\n", "unknown key train.zzzz; [train] has steps, microbatch_size"),
        ("[train]\nsteps = 0\n", ":2: train.steps = 0: must be at least 1"),
        ("[train]\nsteps = true\n", ":2: train.steps = true: expected a whole number"),
        ("[train]\nsteps = 2.5\n", ":2: train.steps = 2.5: expected a whole number"),
        ("[model]\ndropout = 1.0\n", ":2: model.dropout = 1.0: must be below 1"),
        ("[model]\nnorm_eps = 0.0\n", ":2: model.norm_eps = 0.0: must be above 0"),
        ("[model]\nnorm_eps = inf\n", ":2: model.norm_eps = inf: expected a finite number"),
        (
            '[model]\nqk_norm = "wide"\n',
            "expected one of 'none', 'head', 'head_after', 'full' or 'unit'",
        ),
        (
            '[[optimizer.groups]]\npattern = "*"\noptimizer = "none"\nlr_scale = 0.5\n',
            "number 1: the parameters of '*' are frozen (optimizer = \"none\"), so lr_scale",
        ),
        (
            '[[optimizer.groups]]\npattern = "*"\nlr_scal = 0.5\n',
            "[[optimizer.groups]] number 1: unknown key lr_scal; did you mean lr_scale?",
        ),
        (
            '[[optimizer.groups]]\npattern = "*"\noptimizer = "sgd"\nbeta2 = 0.5\n',
            "groups number 1 ('*') sets beta2, which sgd has not; leave it out",
        ),
        ('[optimizer]\nschedule = "WSD"\n', "or 'wsd'; it is called \"wsd\" here"),
        ('[optimizer]\ntail_shape = "1-sqrt"\n', 'it is called "minus_sqrt" here'),
        ("[optimizer]\nwarmup_from = 1.0\n", "warmup_from = 1 is above lr = 0.003"),
        ("[moe]\nexpert_bias_rate = -1\n", ":2: moe.expert_bias_rate = -1: must be at least 0"),
        ("[moe]\nexpert_bias = 0.1\n", "expert_bias = 0.1: expected true or false"),
        ("[moe]\nstatic_budget = 0\n", "static_budget = 0: must be above 0"),
        ('[optimizer]\nname = "adamW"\n', "or 'adamw_8bit'; did you mean adamw?"),
        (
            '[optimizer]\nname = "muon"\nlr = 0.0\nmin_lr = 0.0\nmuon.adamw_lr = 1e-3\n',
            "muon.adamw_lr = 0.001 is a multiple of lr, which is 0; set lr above 0",
        ),
        ("[optimizer]\nnum_instances = 0\n", "num_instances = 0: must be at least 1"),
        ("[pipeline]\noverlap_moe = 2\n", "overlap_moe = 2: expected true or false"),
        ('[checkpoint]\ninterval = "30m"\n', "expected a whole number"),
        ("[run]\ndir = 3\n", ":2: run.dir = 3: expected text in quotes"),
        ("[run]\nplain = 1\n", ":2: run.plain = 1: expected true or false"),
        ('[run]\ndir = "\\u001b[31mx"\n', "must not contain control characters"),
        ("[model]\nhidden_size = 2147483648\n", "must be below 2,147,483,648"),
        ("[train]\nsteps = 99999999999999999999\n", "must be below 2,147,483,648"),
        ("[parallel]\ntp = 9223372036854775806\n", "must be below 2,147,483,648"),
        ('[run]\ndir = ""\n', ':2: run.dir = "": must not be empty'),
        ("[run]\ntimeout_s = 1e30\n", ":2: run.timeout_s = 1e+30: must be at most 604800"),
        ("[run]\npeer_timeout_s = 1e30\n", "must be at most 604800"),
        ("[pipeline]\ngroup_size = 0\n", "pipeline.group_size = 0: must be at least 1"),
        ("[train\n", "is not valid TOML"),
        (
            "[model]\nhidden_size = 130\n",
            ":2: [model] hidden_size = 130 is not a multiple of num_heads = 4; "
            "nearest hidden_size: 128 or 136, or num_heads: 1 or 5, or set head_dim",
        ),
        ("[model]\nhidden_size = 12\n", "= 3 is odd, but rotary embedding turns pairs"),
        (
            "[model]\nnum_heads = 8\nnum_kv_heads = 3\n",
            "num_kv_heads = 3 does not divide num_heads = 8; nearest: 2 or 4",
        ),
        ('[parallel]\norder = "tp-xp"\n', 'axis "xp" is unknown; the axes are tp, cp, ep, dp, pp'),
        ('[parallel]\norder = "tp-tp-dp"\n', 'axis "tp" is named 2 times'),
        ('[parallel]\npp = 2\norder = "tp-dp"\n', "leaves out pp, which has size 2"),
        ("[optimizer]\nmin_lr = 1.0\n", "min_lr = 1 is above lr = 0.003"),
        ('[data]\nsplit = "95"\n', 'expected two or three weights like "95,5"'),
        ('[data]\nsplit = "0,5"\n', "the first above 0"),
    ],
)
def test_a_mistake_is_one_sentence_with_a_fix(tmp_path: Path, text: str, expected: str) -> None:
    message = message_of(write(tmp_path, text))
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        (
            "[model]\nnum_layers = 4\nhidden_size = 96\n",
            [("model.num_heads", "7")],
            "--model.num_heads=7: [model] hidden_size = 96 is not a multiple of num_heads = 7; "
            "nearest hidden_size: 84 or 98, or num_heads: 6 or 8, or set head_dim",
        ),
        (
            "[model]\n",
            [("model.hidden_size", "97"), ("model.num_heads", "7")],
            "--model.hidden_size=97 and --model.num_heads=7: [model] hidden_size = 97 is not a "
            "multiple of num_heads = 7; nearest hidden_size: 84 or 98, or set head_dim",
        ),
        (
            "[moe]\nnum_experts = 8\n",
            [("moe.top_k", "9")],
            "--moe.top_k=9: [moe] top_k = 9: with num_experts = 8 it must lie in [1, 8]",
        ),
        ("[moe]\nnum_experts = 8\n", [("moe.groups_top_k", "3")], "--moe.groups_top_k=3: [moe] "),
        (
            "[moe]\ntop_k = 1\n",
            [("moe.echo.num_spare_slots", "2")],
            "--moe.echo.num_spare_slots=2: [moe] echo.num_spare_slots = 2 is for experts",
        ),
        (
            "[parallel]\npp = 2\n",
            [("parallel.order", "tp-dp")],
            '--parallel.order=tp-dp: [parallel] order = "tp-dp" leaves out pp',
        ),
    ],
)
def test_a_rule_between_settings_names_those_of_the_command_line(
    tmp_path: Path, text: str, settings: list[tuple[str, str]], expected: str
) -> None:
    assert message_of(write(tmp_path, text), settings).startswith(expected)


def test_a_rule_between_settings_of_a_file_names_their_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[moe]\njitter = 0.1\nnum_experts = 4\ntop_k = 9\n")
    assert message_of(path).startswith(f"{path}:4: [moe] top_k = 9")


@pytest.mark.parametrize("heads", [("7", "1"), ("4", "2"), ("12", "4")])
def test_suggested_heads_do_fit(heads: tuple[str, str]) -> None:
    num_heads, kv_heads = heads
    settings = [("model.hidden_size", "90"), ("model.num_kv_heads", kv_heads)]
    message = message_of(None, [*settings, ("model.num_heads", num_heads)])
    for size in message.partition("hidden_size: ")[2].split(",")[0].split(" or "):
        load_config(None, [("model.hidden_size", size), ("model.num_heads", num_heads)])
    for number in filter(None, message.partition("num_heads: ")[2].split(",")[0].split(" or ")):
        load_config(None, [*settings, ("model.num_heads", number)])


def test_missing_file_shows_the_closest_names(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert f"did you mean {path}?" in message_of(tmp_path / "dmo.toml")
    for name in ("zzz", "nope.toml"):
        assert f"{tmp_path} holds demo.toml" in message_of(tmp_path / name)
    assert "the folder" in message_of(tmp_path / "no" / "demo.toml")
    assert f"{tmp_path} is a folder" in message_of(tmp_path)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "demo.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not text in UTF-8" in message_of(path)


def test_a_byte_order_mark_in_front_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "demo.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\nsteps = 3\n")
    config = load_config(path)
    assert (config.train.steps, config.origin("train.steps")) == (3, f"{path}:2")


def test_overrides_are_taken_out_of_a_command_line() -> None:
    line = (
        "--run.plain x.toml --parallel.sequence-parallel --train.steps 20 "
        "--checkpoint.interval -1 --nproc=2 --run.plain false --run.dir=a=b"
    )
    pairs, rest = split_overrides(line.split())
    assert pairs == [
        ("run.plain", "true"),
        ("parallel.sequence_parallel", "true"),
        ("train.steps", "20"),
        ("checkpoint.interval", "-1"),
        ("run.plain", "false"),
        ("run.dir", "a=b"),
    ]
    assert rest == ["x.toml", "--nproc=2"]
    with pytest.raises(ConfigError, match=r"--train\.steps needs a value"):
        split_overrides(["--train.steps", "--run.plain"])


def test_lines_of_keys_survive_strings_and_spacing() -> None:
    text = '# [x]\n[ a ]\n"k" = """\n[b]\nc = 1\n"""\nd=2 # e = 3\nf.g = 1\n'
    assert key_lines(text) == {"a": 2, "a.k": 3, "a.d": 7, "a.f.g": 8}


def test_origin_tells_file_line_override_or_default(tmp_path: Path) -> None:
    path = write(tmp_path, "[parallel]\n\ntp = 2\n")
    config = load_config(path, [("parallel.pp", "2")])
    assert config.origin("parallel.tp") == f"{path}:3"
    assert config.origin("parallel.pp") == "--parallel.pp=2"
    assert config.origin("parallel.cp") == "default"
    assert pickle.loads(pickle.dumps(config)).origin("parallel.tp") == f"{path}:3"
    assert resolve(config, 4, vocab_size=256, cuda=False).origin("parallel.tp") == f"{path}:3"


def test_config_is_frozen_and_compares_by_value() -> None:
    config = load_config(None, [("train.steps", "3")])
    assert config == Config.model_validate({"train": {"steps": 3}})
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 4  # type: ignore[misc]


@given(
    steps=st.integers(1, 10**6),
    lr=st.floats(0, 1e3),
    name=st.text(min_size=1).filter(lambda text: text.isprintable() and "/" not in text),
    world=st.sampled_from([1, 2, 4, 8]),
    tie=st.booleans(),
)
def test_saved_config_makes_the_same_run_again(
    tmp_path_factory: pytest.TempPathFactory,
    steps: int,
    lr: float,
    name: str,
    world: int,
    tie: bool,
) -> None:
    config = Config.model_validate(
        {
            "model": {"tie_embeddings": tie},
            "train": {"steps": steps},
            "optimizer": {"lr": lr},
            "run": {"dir": f"x{name}"},
        }
    )
    resolved = resolve(config, world, vocab_size=256, cuda=False)
    path = write(tmp_path_factory.mktemp("config"), config_to_toml(resolved), "config.toml")
    assert load_config(path) == config
    assert resolve(load_config(path), world, vocab_size=256, cuda=False) == resolved


def test_saved_config_shows_derived_values_and_derives_them_anew(tmp_path: Path) -> None:
    settings = [("run.dir", "A"), ("parallel.tp", "2"), ("model.num_kv_heads", "2")]
    resolved = resolve(load_config(None, settings), 4, vocab_size=256, cuda=False)
    text = config_to_toml(resolved)
    lines = text.splitlines()
    assert {"# etp = 2   (derived)", "# nproc = 4   (derived)", "num_kv_heads = 2"} <= set(lines)
    assert '# dir = "A/checkpoints"   (derived)' in lines
    path = write(tmp_path, text, "config.toml")
    changes = [("run.dir", "B"), ("parallel.tp", "1"), ("train.steps", "20"), ("optimizer.lr", "1")]
    again = resolve(load_config(path, changes), 1, vocab_size=256, cuda=False)
    assert (again.checkpoint.dir, again.parallel.etp, again.run.nproc) == ("B/checkpoints", 1, 1)
    assert again.optimizer.min_lr == 0.1
    assert (again.debug.trace_step, again.model.num_kv_heads) == (10, 2)


def test_saved_config_starts_anew(tmp_path: Path) -> None:
    text = config_to_toml(load_config(None, [("checkpoint.resume", "auto")]))
    assert '# resume = "auto"   (of one start)' in text.splitlines()
    assert load_config(write(tmp_path, text)).checkpoint.resume is None


def test_saved_config_names_every_setting() -> None:
    text = config_to_toml(resolve(Config(), 2, vocab_size=256, cuda=False))
    lines = text.splitlines()
    for section, cls in section_classes().items():
        begin = lines.index(f"[{section}]")
        end = lines.index("", begin) if "" in lines[begin:] else len(lines)
        named = [line.removeprefix("# ").split()[0] for line in lines[begin + 1 : end]]
        assert named == list(cls.by_key())
    assert "# memory_limit is not set: as many as it takes" in lines
    assert (
        "# resume is not set: auto if SLURM or torchrun has restarted the run, else start anew"
        in lines
    )
    for line in lines:
        assert not line.endswith("is not set: ")


def test_derived_settings_are_known_and_travel_to_other_processes() -> None:
    config = load_config(None, [("optimizer.min_lr", "0")])
    resolved = resolve(
        resolve(config, 2, vocab_size=256, cuda=False), 2, vocab_size=256, cuda=False
    )
    assert config.derived == frozenset()
    assert {"parallel.etp", "run.nproc", "model.vocab_size"} <= resolved.derived
    assert not {"optimizer.min_lr", "model.num_layers"} & resolved.derived
    copy = pickle.loads(pickle.dumps(resolved))
    assert copy.derived == resolved.derived
    assert config_to_toml(copy) == config_to_toml(resolved)


def test_every_field_has_a_description() -> None:
    for name, cls in section_classes().items():
        for key, info in cls.by_key().items():
            assert info.description, f"{name}.{key}"
            assert info.description.endswith("."), f"{name}.{key}"


@pytest.mark.parametrize(
    "switch", ["pipeline.overlap_moe", "moe.expert_bias", "data.document_mask"]
)
def test_a_word_after_a_switch_is_its_value_only_if_it_can_be(switch: str) -> None:
    pairs, others = split_overrides([f"--{switch}", "run.toml"])
    assert (pairs, others) == ([(switch, "true")], ["run.toml"])


@pytest.mark.parametrize(
    ("key", "text", "names"),
    [
        ("train.recompute", "norm,moe", ["norm", "moe"]),
        ("train.recompute", "full", ["full"]),
        ("train.recompute", "none", []),
        ("graphs.scopes", "attn, mlp", ["attn", "mlp"]),
        ("run.writers", "tensorboard", ["tensorboard"]),
        ("train.callbacks", "package.module:Name", ["package.module:Name"]),
    ],
)
def test_text_in_place_of_a_list_of_names_is_answered_with_the_list(
    tmp_path: Path, key: str, text: str, names: list[str]
) -> None:
    section, _, name = key.partition(".")
    message = message_of(write(tmp_path, f'[{section}]\n{name} = "{text}"\n'))
    start, _, advice = message.partition(", as in ")
    assert start.endswith(f':2: {key} = "{text}": expected a list')
    taken = write(tmp_path, f"[{section}]\n{advice}\n")
    assert getattr(getattr(load_config(taken), section), name) == names
    shown = load_config(None, [(key, text.replace(" ", ""))])  # on the command line, text is right
    assert getattr(getattr(shown, section), name) == names


@pytest.mark.parametrize(
    ("key", "best"),
    [("graphs.scopes", "attn"), ("run.writers", "wandb"), ("train.recompute", "norm")],
)
def test_an_unknown_name_in_a_list_is_named_with_the_closest(key: str, best: str) -> None:
    with pytest.raises(ConfigError, match=rf'{key}, entry 2 = "{best}x": expected one of'):
        load_config(None, [(key, f"{best},{best}x")])
    with pytest.raises(ConfigError, match=rf"did you mean {best}\?$"):
        load_config(None, [(key, f"{best}x")])
    assert (
        getattr(getattr(load_config(None, [(key, "none")]), key.split(".")[0]), key.split(".")[1])
        == []
    )


def test_names_of_other_projects_lead_to_settings(tmp_path: Path) -> None:
    known = {f"{name}.{key}" for name, cls in section_classes().items() for key in cls.by_key()}
    assert {key for keys in ELSEWHERE.values() for key in keys.split()} <= known
    homes = {key: keys for key, keys in ELSEWHERE.items() if setting_homes(key) != keys.split()}
    assert homes == {"warmup_steps": "optimizer.warmup"}  # [graphs] has a setting of this name
    text = message_of(write(tmp_path, "[parallel]\ntensor_model_parallel_size = 2\n"))
    assert text.endswith("did you mean parallel.tp?")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("debug.host_memory", "run.host_memory"),
        ("debug.loss_scale", "optimizer.loss_scale"),
        ("debug.pad_for_ring", "optimizer.pad_for_ring"),
        ("debug.router_fp32", "moe.router_fp32"),
        ("debug.graph_backend", "graphs.backend"),
        ("debug.graph_warmup_steps", "graphs.warmup_steps"),
        ("train.step", "train.steps"),
        ("optimizer.decay_steps", "optimizer.decay_end or optimizer.tail_length"),
        ("optimizer.warmup_steps", "optimizer.warmup or graphs.warmup_steps"),
        ("optimizer.decay_ratio", "optimizer.tail_length"),
        ("optimizer.lr_wsd_decay_style", "optimizer.tail_shape"),
        ("train.vocab_size", "model.vocab_size"),
    ],
)
def test_a_setting_in_another_section_is_named(tmp_path: Path, before: str, now: str) -> None:
    section, _, name = before.partition(".")
    text = message_of(write(tmp_path, f"[{section}]\n{name} = 1\n"))
    assert text.endswith(f":2: unknown key {before}; did you mean {now}?")
