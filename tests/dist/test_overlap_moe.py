"""Rows travel to their experts while another microbatch is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacore.moe.dispatchers import HostPeers
from megacore.moe.dispatchers.peer_memory import PendingPull
from megacore.parallel import row_exchange
from megacore.parallel.async_collectives import PendingCollective
from megatrain.train.trainer import build_trainer
from tests.dist.test_moe_invariance import EP2, PP2, make_config
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

DUALPIPE = {
    **PP2,
    **EP2,
    "pipeline.schedule": "dualpipe_v",
    "train.microbatch_size": 1,
    "train.global_batch_size": 12,
    "moe.layer_pattern": "e",
    "model.dropout": 0.1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "static": {"moe.dispatcher": "static", "moe.static_transport": "collective"},
    "peers": {"moe.dispatcher": "static", "moe.static_transport": "peer"},
    "peers, recomputed": {
        **{"moe.dispatcher": "static", "moe.static_transport": "peer"},
        **{"train.recompute": ["full"]},
    },
    "recomputed": {"train.recompute": ["full"], "optimizer.overlap": "grads"},
}


class Log:
    """What starts and ends between the start of an exchange and the wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_exchanges = 0
        self.entries: list[tuple[str, int]] = []
        start, wait = row_exchange.all_to_all_async, PendingCollective.wait
        numbers: dict[int, int] = {}

        def logged_start(*args: Any) -> tuple[torch.Tensor, PendingCollective]:
            rows, pending = start(*args)
            numbers[id(pending)] = self.num_exchanges
            self.entries.append(("start", self.num_exchanges))
            self.num_exchanges += 1
            return rows, pending

        def logged_wait(pending: PendingCollective) -> None:
            number = numbers.pop(id(pending), None)
            if number is not None:
                self.entries.append(("wait", number))
            wait(pending)

        monkeypatch.setattr(row_exchange, "all_to_all_async", logged_start)
        monkeypatch.setattr(PendingCollective, "wait", logged_wait)
        for way in ("push", "pull"):
            self._watch_peers(monkeypatch, way)
        # Of each pull, whether a product wrote its rows to the slot.
        self.pulls_in_place: list[bool] = []
        holds = PendingPull.holds

        def logged_holds(pull: PendingPull, rows: torch.Tensor) -> bool:
            self.pulls_in_place.append(holds(pull, rows))
            return self.pulls_in_place[-1]

        monkeypatch.setattr(PendingPull, "holds", logged_holds)

    def _watch_peers(self, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
        start, finish = getattr(HostPeers, f"start_{way}"), getattr(HostPeers, f"finish_{way}")
        numbers: dict[int, int] = {}

        def logged_start(peers: HostPeers, *args: Any) -> Any:
            ticket = start(peers, *args)
            numbers[id(args[0] if way == "pull" else ticket)] = self.num_exchanges
            self.entries.append(("start", self.num_exchanges))
            self.num_exchanges += 1
            return ticket

        def logged_finish(peers: HostPeers, ticket: Any, *args: Any) -> None:
            self.entries.append(("wait", numbers.pop(id(ticket))))
            finish(peers, ticket, *args)

        monkeypatch.setattr(HostPeers, f"start_{way}", logged_start)
        monkeypatch.setattr(HostPeers, f"finish_{way}", logged_finish)

    def num_with_work_in_between(self) -> int:
        """Exchanges during which another one started, which takes a layer's computation."""
        at = {entry: place for place, entry in enumerate(self.entries)}
        return sum(at["wait", n] - at["start", n] > 2 for n in range(self.num_exchanges))


def train_both(_rank: int, variant: str) -> list[Any]:
    found = []
    for overlap in (False, True):
        changes = {**DUALPIPE, **VARIANTS[variant], "pipeline.overlap_moe": overlap}
        trainer = build_trainer(make_config(4, changes), world_size=4, device=torch.device("cpu"))
        with pytest.MonkeyPatch.context() as monkeypatch:
            log = Log(monkeypatch)
            metrics = [trainer.train_step(step) for step in range(3)]
        weights = [piece.tensors["main_param"].clone() for piece in trainer.pieces()]
        numbers = [(step.loss, step.grad_norm, step.experts) for step in metrics]
        found.append((numbers, weights, log.num_exchanges, log.num_with_work_in_between()))
        assert log.pulls_in_place == [True] * len(log.pulls_in_place)
        assert bool(log.pulls_in_place) == variant.startswith("peers")
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_passes_in_turns_change_no_bit_and_fill_the_time_of_exchanges(variant: str) -> None:
    for plain, overlapped in run_ranks(4, train_both, variant, timeout_s=120):
        assert overlapped[0] == plain[0]
        for weight, expected in zip(overlapped[1], plain[1], strict=True):
            assert torch.equal(weight, expected)
        assert overlapped[2] == plain[2], "no exchange more"
        assert overlapped[3] > plain[3] + 20, (plain[2:], overlapped[2:])
