"""Training on pairs: the losses of a plain torch loop and of TRL, in every layout."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megacore.errors import ConfigError, DataError
from megacore.optim.lr import learning_rate
from megatrain.checkpoint import TrainState, load_checkpoint, save_checkpoint
from megatrain.config import ResolvedConfig, load_config, resolve
from megatrain.data.pairs import PairDataset
from megatrain.train.evaluate import evaluate_pairs, open_source
from megatrain.train.initial_weights import load_initial_weights
from megatrain.train.references import check_references
from megatrain.train.trainer import Trainer, build_trainer
from tests.dist.test_families import _is_decayed, import_model
from tests.support.campaigns import representatives
from tests.support.chat import CHATML, save_tokenizer
from tests.support.configs import rank_context
from tests.support.distributed import run_ranks

# On a busy machine, twenty steps take longer than the limit of most tests.
patient_ranks = functools.partial(run_ranks, timeout_s=300)
STEPS = 20
PAIRS = [
    {"prompt": f"Is {a} plus {b} {'ten' * (b % 3)}?", "chosen": f" {a + b}", "rejected": f" n{a}o!"}
    for a in range(1, 7)
    for b in range(1, 5)
]
SETTINGS: dict[str, Any] = {
    "preference.loss": "sigmoid",
    "preference.beta": 0.5,
    "model.seq_length": 64,
    "data.split": "1,0",
    "train.steps": STEPS,
    "train.global_batch_size": 8,
    "train.microbatch_size": 2,
    "train.eval_interval": 0,
    "optimizer.lr": 1e-3,
}


def make_config(folder: Path, world_size: int, changes: dict[str, Any]) -> ResolvedConfig:
    settings = SETTINGS | {
        "data.source": folder / "pairs.jsonl",
        "data.cache": folder / "cache",
        "run.dir": folder / "run",
    }
    overrides = [
        (key, str(value).lower() if isinstance(value, bool) else str(value))
        for key, value in (settings | changes).items()
    ]
    return resolve(load_config(folder / "ours" / "config.toml", overrides), world_size, cuda=False)


def write_pairs(folder: Path, rows: list[dict[str, Any]] = PAIRS) -> None:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_reference(
    rank: int, world_size: int, folder: Path, changes: dict[str, Any]
) -> dict[str, Any]:
    given = {
        key: value for key, value in SETTINGS.items() if key.startswith(("model.", "train.glob"))
    }
    given |= {"train.microbatch_size": 2, "data.cache": folder / "cache"}
    settings = [(key, str(value)) for key, value in (given | changes).items()]
    source = open_source(folder / "ours", settings, pairs=str(folder / "pairs.jsonl"))
    config = resolve(source.config, world_size, vocab_size=260, cuda=False)
    return evaluate_pairs(source, config, rank_context(rank, world_size))


def start(folder: Path, world_size: int, changes: dict[str, Any]) -> Trainer:
    config = make_config(folder, world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    load_initial_weights(trainer, folder / "ours")
    check_references(trainer)
    return trainer


def train(
    _rank: int, world_size: int, folder: Path, changes: dict[str, Any]
) -> list[dict[str, float]]:
    trainer = start(folder, world_size, changes)
    found = []
    for step in range(STEPS):
        metrics = trainer.train_step(step)
        found.append({"loss": metrics.loss, "grad_norm": metrics.grad_norm, **metrics.groups})
    return found


def sums_of(theirs: Any, data: PairDataset, pair: int) -> tuple[Tensor, Tensor]:
    """Sums of the log-probs of both answers, each row by itself, and their tokens."""
    sums, counts = [], []
    for side in (0, 1):
        ids, counted = data.pairs.answer(pair, side)
        tokens = torch.from_numpy(ids)[None]
        logits = theirs(input_ids=tokens, use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        mask = torch.from_numpy(counted[1:])
        sums.append(logprobs[mask].sum())
        counts.append(mask.sum())
    return torch.stack(sums), torch.stack(counts)


Formula = Callable[[Tensor, Tensor, float], Tensor]
FORMULAS: dict[str, Formula] = {
    "sigmoid": lambda ratios, _, beta: -logsigmoid(beta * (ratios[0] - ratios[1])),
    "hinge": lambda ratios, _, beta: (1 - beta * (ratios[0] - ratios[1])).clamp(min=0),
    "ipo": lambda ratios, n, beta: (ratios[0] / n[0] - ratios[1] / n[1] - 0.5 / beta) ** 2,
}


def train_plainly(theirs: Any, config: ResolvedConfig, data: PairDataset) -> list[dict[str, float]]:
    """The same steps of transformers' model with torch's AdamW, pair by pair."""
    policy, reference = theirs.train(), copy.deepcopy(theirs).eval()
    settings, batch_size = config.optimizer, config.train.global_batch_size
    groups = [
        {"params": [p for n, p in policy.named_parameters() if not _is_decayed(n)]},
        {"params": [p for n, p in policy.named_parameters() if _is_decayed(n)]},
    ]
    groups[0]["weight_decay"] = 0.0
    optimizer = torch.optim.AdamW(
        groups,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    formula, beta = FORMULAS[str(config.preference.loss)], config.preference.beta
    found = []
    for step in range(STEPS):
        records: list[list[float]] = []
        pairs = [
            int(pair)
            for number in range(step * batch_size, (step + 1) * batch_size)
            for pair in data.pairs_of(number)
        ]
        for pair in pairs:
            sums, counts = sums_of(policy, data, pair)
            with torch.no_grad():
                ratios_to = sums_of(reference, data, pair)[0]
            ratios = sums - ratios_to
            loss = formula(ratios, counts, beta)
            (loss / len(pairs)).backward()
            better, worse = (beta * ratios).tolist()
            is_right = float(better > worse)
            records.append([loss.item(), better, worse, better - worse, is_right, *sums.tolist()])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options=settings.rate_options(), total=STEPS)
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        means = torch.tensor(records, dtype=torch.float64).mean(0).tolist()
        names = ("loss", *(f"rewards/{x}" for x in ("chosen", "rejected", "margins")))
        names += ("rewards/accuracies", "logps/chosen", "logps/rejected")
        found.append({**dict(zip(names, means, strict=True)), "grad_norm": norm.item()})
    return found


def assert_same(ours: list[dict[str, float]], expected: list[dict[str, float]], tol: float) -> None:
    assert len(ours) == len(expected) == STEPS
    for step, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if step == 0 and name == "rewards/accuracies":
                continue  # all margins are 0 but for rounding
            assert value == pytest.approx(other[name], rel=tol, abs=tol), (step, name)


@pytest.mark.dist
@pytest.mark.parametrize("loss", FORMULAS)
def test_twenty_steps_are_those_of_a_plain_loop(loss: str, tmp_path: Path) -> None:
    theirs = import_model("llama", tmp_path)
    write_pairs(tmp_path)
    written = patient_ranks(1, write_reference, 1, tmp_path, {})[0]
    assert written["pairs"] == len(PAIRS)
    assert written["notes"] == []
    changes = {"preference.loss": loss}
    ours = patient_ranks(1, train, 1, tmp_path, changes)[0]
    data = start(tmp_path, 1, changes).data.train
    assert isinstance(data, PairDataset)
    expected = train_plainly(theirs, make_config(tmp_path, 1, changes), data)
    assert_same(ours, expected, 1e-5 if loss != "ipo" else 5e-5)
    assert ours[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert ours[-1]["rewards/margins"] > 0.05, "the model must have learnt something"


TP2, CP2, PP2 = {"parallel.tp": 2}, {"parallel.cp": 2}, {"parallel.pp": 2}
SP = {"parallel.sequence_parallel": True}
PACKED = {"data.packing": "best_fit"}
PP2L = {**PP2, "pipeline.layout": "Ett|tL"}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dp2": ("llama", 2, {}),
    "tp2 sequence parallel": ("llama", 2, {**TP2, **SP}),
    "cp2": ("llama", 2, CP2),
    "cp2 ring": ("llama", 2, {**CP2, "parallel.cp_comm": "ring"}),
    "pp2": ("llama", 2, PP2L),
    "pp2, dualpipe": ("llama", 2, {**PP2L, "pipeline.schedule": "dualpipe"}),
    "tp2 cp2": ("llama", 4, {**TP2, **CP2}),
    "pp2 cp2, weight gradients apart": (
        "llama",
        4,
        {**PP2L, **CP2, "pipeline.schedule": "zb_h1"},
    ),
    "ep2": ("qwen3-moe", 2, {"parallel.ep": 2}),
    "tp2, ep2": ("qwen3-moe", 2, {**TP2, "parallel.etp": 1, "parallel.ep": 2}),
}
CASES = [f"{layout} | {how}" for layout in LAYOUTS for how in ("a pair a sample", "packed")]
REPRESENTATIVES = [
    "tp2 sequence parallel | packed",
    "cp2 | a pair a sample",
    "pp2 cp2, weight gradients apart | packed",
    "tp2, ep2 | packed",
]
# Experts of tokens with nearly equal scores change with the rounding, so few steps of them.


@pytest.mark.dist
@pytest.mark.parametrize("case", representatives(CASES, REPRESENTATIVES))
def test_every_layout_has_the_steps_of_one_process(case: str, tmp_path: Path) -> None:
    layout, how = case.split(" | ")
    family, world_size, changes = LAYOUTS[layout]
    packed = PACKED if how == "packed" else {}
    import_model(family, tmp_path)
    write_pairs(tmp_path)
    evaluated = {key: value for key, value in changes.items() if "schedule" not in key}
    patient_ranks(world_size, write_reference, world_size, tmp_path, {**evaluated, **packed})
    whole = {**packed, "train.microbatch_size": 4}
    expected = patient_ranks(1, train, 1, tmp_path, whole)[0]
    changes = {**changes, **packed}
    for ours in patient_ranks(world_size, train, world_size, tmp_path, changes):
        assert_same(ours, expected, 2e-5)


def step_and_save(
    _rank: int, world_size: int, folder: Path, changes: dict[str, Any], steps: range
) -> list[float]:
    """Some steps, from the checkpoint of the step before if there is one."""
    trainer = start(folder, world_size, changes)
    place = folder / "checkpoints"
    if steps.start > 0:
        state = load_checkpoint(place, trainer.pieces(), groups=trainer.groups)
        trainer.optimizer.load_scalars(state.optimizer)
        trainer.optimizer.finish_load(steps.start)
    losses = [trainer.train_step(step).loss for step in steps]
    save_checkpoint(
        place,
        trainer.pieces(),
        state=TrainState(step=steps.stop, samples=0, optimizer=trainer.optimizer.scalars()),
        config=trainer.config.model_dump(),
        groups=trainer.groups,
    )
    return losses


@pytest.mark.dist
def test_a_resumed_run_is_exact(tmp_path: Path) -> None:
    import_model("llama", tmp_path)
    write_pairs(tmp_path)
    patient_ranks(2, write_reference, 2, tmp_path, TP2)
    changes = {**TP2, **PACKED}
    whole = patient_ranks(2, step_and_save, 2, tmp_path, changes, range(8))[0]
    halves = [
        *patient_ranks(2, step_and_save, 2, tmp_path, changes, range(4))[0],
        *patient_ranks(2, step_and_save, 2, tmp_path, changes, range(4, 8))[0],
    ]
    assert whole == halves


def test_the_reference_of_new_adapters_is_that_of_their_base(tmp_path: Path) -> None:
    import_model("llama", tmp_path)
    write_pairs(tmp_path)
    write_reference(0, 1, tmp_path, {})
    adapted = {"lora.rank": 2, "lora.dora": True}
    for dtype in ("float32", "bfloat16", "float16"):  # of frozen weights, the only one
        trainer = start(tmp_path, 1, {**adapted, "train.dtype": dtype})
    metrics = trainer.train_step(0)
    assert metrics.groups["rewards/margins"] == pytest.approx(0.0, abs=2e-2)
    with pytest.raises(DataError, match="whose weights differ from those of checkpoint"):
        check_references(trainer)  # of adapters that have been trained


def test_wrong_references_are_refused(tmp_path: Path) -> None:
    import_model("llama", tmp_path)
    write_pairs(tmp_path)
    with pytest.raises(DataError, match=r"pairs\.jsonl\.reference does not exist: .* eval MODEL"):
        start(tmp_path, 1, {})
    write_reference(0, 1, tmp_path, {})
    start(tmp_path, 1, {})
    with pytest.raises(DataError, match="was made from other tokens of pair 0 of pairs"):
        start(tmp_path, 1, {"preference.max_length": 20})
    path = tmp_path / "pairs.jsonl.reference"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match="must have 24 pairs, got 23; megacore eval"):
        start(tmp_path, 1, {})
    path.write_text(json.dumps(json.loads(lines[0]) | {"weights": {"float32": "0"}}) + "\n")
    path.write_text("\n".join([path.read_text().strip(), *lines[1:]]))
    with pytest.raises(DataError, match="whose weights differ from those of checkpoint"):
        start(tmp_path, 1, {})
    start(tmp_path, 1, {"preference.any_reference": True})
    path.write_text("nothing")
    with pytest.raises(DataError, match="is not a file of reference log-probs"):
        start(tmp_path, 1, {})


BAD_ROWS = {
    "no rejected": ({"prompt": "a", "chosen": "b"}, 'both "chosen" and "rejected", got prompt, ch'),
    "empty": (
        {"chosen": "b", "rejected": ""},
        'must have both "chosen" and "rejected", got an empty rejected',
    ),
    "equal": ({"chosen": "ab", "rejected": "ab"}, "must differ, but are equal"),
    "mixed": ({"chosen": "ab", "rejected": [{"role": "user"}]}, "all be text, .* got list, str"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_pairs_are_one_sentence(name: str, tmp_path: Path) -> None:
    row, message = BAD_ROWS[name]
    import_model("llama", tmp_path)
    write_pairs(tmp_path, [*PAIRS[:3], row])
    with pytest.raises(DataError, match=rf"pairs\.jsonl, line 4: .*{message}"):
        start(tmp_path, 1, {"preference.loss": "simpo"})


def test_cut_and_unusable_pairs_are_told(tmp_path: Path) -> None:
    import_model("llama", tmp_path)
    long = {"prompt": "x", "chosen": "y" * 90, "rejected": "z"}
    full = {"prompt": "x" * 70, "chosen": "y", "rejected": "z"}
    write_pairs(tmp_path, [*PAIRS, long, full])
    trainer = start(tmp_path, 1, {"preference.loss": "simpo"})
    rule = "preference.max_length = 32 tokens"
    cut, left_out = trainer.data.notes[-2:]
    assert cut == f"pairs.jsonl: 1 of 26 pairs have an answer that is cut at {rule}"
    assert f"1 of 26 pairs are left out: a prompt fills {rule}" in left_out
    write_pairs(tmp_path, [full])
    with pytest.raises(DataError, match="no pair whose answers begin within"):
        start(tmp_path, 1, {"preference.loss": "simpo"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preference.beta": 0}, r"preference\.beta = 0.*above 0|greater than 0"),
        ({"preference.loss": "dpo"}, 'must be "sigmoid", which is the loss of DPO$'),
        ({"preference.loss": "ipo", "preference.label_smoothing": 0.1}, 'is for loss = "sigmoid"'),
        ({"preference.max_length": 40}, "max_length = 40 .* must be at most 32, half of model"),
        ({"train.loss": "a:b"}, r"preference\.loss = sigmoid .* does not go with train\.loss"),
        ({"data.order": "megatron"}, r"does not go with data\.order = megatron"),
    ],
)
def test_settings_that_do_not_fit_are_one_sentence(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    import_model("llama", tmp_path)
    write_pairs(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path, 1, changes)


def train_with_trl(
    theirs: Any, config: ResolvedConfig, rows: list[dict[str, Any]], out: Path
) -> Any:
    """The same steps by TRL, on the pairs in the order of ours; returns its log."""
    datasets = pytest.importorskip("datasets", reason="needs datasets, which make test installs")
    trl = pytest.importorskip("trl")
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("accelerate")
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer

    settings = config.optimizer
    rates = [learning_rate(s, options=settings.rate_options(), total=STEPS) for s in range(STEPS)]
    arguments = trl.DPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=config.train.microbatch_size,
        gradient_accumulation_steps=config.num_microbatches(1),
        max_steps=STEPS,
        logging_steps=1,
        beta=config.preference.beta,
        loss_type=[config.preference.loss],
        max_length=config.preference.limit(config.model.seq_length),
        max_grad_norm=settings.clip_grad,
        learning_rate=settings.lr,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for n, p in theirs.named_parameters() if not _is_decayed(n)],
                "weight_decay": 0.0,
            },
            {"params": [p for n, p in theirs.named_parameters() if _is_decayed(n)]},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rates[min(step, STEPS - 1)] / settings.lr
    )

    class InOrder(trl.DPOTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    trainer = InOrder(
        model=theirs,
        ref_model=copy.deepcopy(theirs),
        args=arguments,
        # datasets cannot compute a fingerprint with every version of pyarrow.
        train_dataset=datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint="pairs"),
        processing_class=AutoTokenizer.from_pretrained(out.parent / "tokenizer"),
        optimizers=(optimizer, scheduler),
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "rewards/chosen" in line]


CONVERSATIONS = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}],
    }
    for row in PAIRS
]
IMPLICIT = [
    {name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in CONVERSATIONS
]


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")  # of TRL and accelerate
@pytest.mark.parametrize(
    ("form", "loss"),
    representatives(
        [("text", "sigmoid"), ("text", "hinge"), ("conversations", "ipo"), ("implicit", "sigmoid")],
        [("text", "sigmoid")],
    ),
)
def test_twenty_steps_are_those_of_trl(form: str, loss: str, tmp_path: Path) -> None:
    rows = {"text": PAIRS, "conversations": CONVERSATIONS, "implicit": IMPLICIT}[form]
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template=CHATML)
    theirs = import_model("llama", tmp_path, vocab_size=len(tokenizer))
    write_pairs(tmp_path, rows)
    changes = {
        "preference.loss": loss,
        "data.tokenizer": tmp_path / "tokenizer" / "tokenizer.json",
        "model.seq_length": 128,
    }
    given = {key: value for key, value in changes.items() if key != "preference.loss"}
    patient_ranks(1, write_reference, 1, tmp_path, given)
    ours = patient_ranks(1, train, 1, tmp_path, changes)[0]
    data = start(tmp_path, 1, changes).data.train
    assert isinstance(data, PairDataset)
    config = make_config(tmp_path, 1, changes)
    count = STEPS * config.train.global_batch_size
    order = [int(pair) for number in range(count) for pair in data.pairs_of(number)]
    log = train_with_trl(theirs, config, [rows[pair] for pair in order], tmp_path / "trl")
    for step, (one, other) in enumerate(zip(ours, log, strict=True)):
        for name, value in one.items():
            if step == 0 and name == "rewards/accuracies":
                continue
            tol = 5e-5 if name == "grad_norm" else 1e-5
            assert value == pytest.approx(other[name], rel=tol, abs=tol), (step, name)
