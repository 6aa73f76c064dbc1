"""Layout rules: constraints of tp, cp, ep, etp, pp and dp on the model, batch and processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from megatrain.config.base import (
    divisors,
    nearest_divisors,
    nearest_multiples,
    nearest_of,
)
from megatrain.config.parallel import AXES
from megatrain.config.problems import ConfigErrors, count_of
from megatrain.config.resolved import ResolvedConfig

_TRIED = 16  # numbers of processes below and above that are tried for a suggestion


def _check_layout(problems: ConfigErrors, config: ResolvedConfig) -> None:
    parallel, world = config.parallel, problems.world_size
    product = parallel.tp * parallel.cp * parallel.pp
    if world % product == 0:
        if world > product and "dp" not in parallel.order.split("-"):
            problems.add(
                f"{problems.shown('parallel.order')} leaves out dp, which has size "
                f'{world // product} on {world} processes; for example "{"-".join(AXES)}"'
            )
        return
    factors = " x ".join(
        f"{axis} {getattr(parallel, axis)} ({config.origin(f'parallel.{axis}')})"
        for axis in ("tp", "cp", "pp")
    )
    problems.add(
        f"the layout does not fit {count_of(world, 'process')} ({problems.launcher}): {factors} = "
        f"{product}, and {world} is not a multiple of it{_nearest_layouts(problems, product)}"
    )


def _nearest_layouts(problems: ConfigErrors, product: int) -> str:
    """Return changes that all layout rules accept: of the processes, or of tp and pp.

    Args:
        problems: The configuration.
        product: Processes of one replica of the model.
    """
    world, parallel = problems.world_size, problems.config.parallel
    fixes = [f"start {counts} processes"] if (counts := _nearest_worlds(problems, product)) else []
    batch, cp = problems.config.train.global_batch_size, parallel.cp
    shapes = [
        (tp, pp)
        for tp in divisors(world // math.gcd(world, cp))
        for pp in divisors(world // tp)
        # All rules run for each shape; thousands of a large world do not fit the batch.
        if world % (tp * pp * cp) == 0 and batch % (world // (tp * pp * cp)) == 0
    ]

    def distance(shape: tuple[int, int]) -> tuple[int, float]:
        tp, pp = shape
        changed = (tp != parallel.tp) + (pp != parallel.pp)
        return changed, abs(tp - parallel.tp) / parallel.tp + abs(pp - parallel.pp) / parallel.pp

    ordered = sorted(shapes, key=distance)
    fitting = (shape for shape in ordered if problems.accepts(world, tp=shape[0], pp=shape[1]))
    fixes += [f"use tp={tp} pp={pp}" for tp, pp in itertools.islice(fitting, 2)]
    if fixes:
        return f"; nearest: {', or '.join(fixes)}"
    return (
        f"; start {nearest_multiples(world, product)} processes, and change what does not fit them"
    )


def _nearest_worlds(problems: ConfigErrors, unit: int) -> str:
    """Return the multiples of ``unit`` around the processes that all layout rules accept."""
    last = problems.world_size // unit  # a multiple below, if it is one

    def first(counts: Iterable[int]) -> list[int]:
        accepted = (count * unit for count in counts if problems.accepts(count * unit))
        return list(itertools.islice(accepted, 1))

    below = first(range(last, max(0, last - _TRIED), -1))
    above = first(range(last + 1, last + 1 + _TRIED))
    return " or ".join(map(str, below + above))


def _check_model_fits_tp(problems: ConfigErrors, config: ResolvedConfig) -> None:
    tp = config.parallel.tp
    keys = ["num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_pad_multiple"]
    if config.model.factory is not None:
        keys = []  # layers of a model of one's own check what they split
    if config.parallel.sequence_parallel:
        keys.append("seq_length")
    for key in keys:
        value = getattr(config.model, key)
        if value % tp:
            shown = problems.shown(f"model.{key}")
            problems.add(
                f"{shown} is not a multiple of {problems.shown('parallel.tp')}; nearest: "
                f"tp={nearest_divisors(tp, value)}, or {key}={nearest_multiples(value, tp)}"
            )


def _check_sequence_fits_cp(problems: ConfigErrors, config: ResolvedConfig) -> None:
    """Check the length: context parallelism needs two slices per rank, to balance load."""
    parallel, length = config.parallel, config.model.seq_length
    slices = parallel.tp if parallel.sequence_parallel else 1
    unit = 2 * parallel.cp * slices
    if parallel.cp > 1 and length % unit:
        factors = f"2 * {problems.shown('parallel.cp')}" + (
            f" * {problems.shown('parallel.tp')}" if slices > 1 else ""
        )
        problems.add(
            f"{problems.shown('model.seq_length')} is not a multiple of {factors} = {unit}, the "
            f"slices of a sequence; nearest seq_length: {nearest_multiples(length, unit)}"
        )


def _check_heads_fit_cp(problems: ConfigErrors, config: ResolvedConfig) -> None:
    """Check the heads: all but ``allgather`` exchange heads of keys, ``a2a`` divides them."""
    parallel, model = config.parallel, config.model
    if parallel.cp == 1 or parallel.cp_comm == "allgather":
        return
    comm = problems.shown("parallel.cp_comm")
    if model.mla.kv_rank:
        problems.add(
            f"{comm} exchanges heads of keys, but {problems.shown('model.mla.kv_rank')} gathers "
            'narrower latents; set cp_comm = "allgather"'
        )
    unit = parallel.tp * parallel.cp
    if parallel.cp_comm == "ring":
        return
    if model.factory is None and model.num_kv_heads % unit:
        problems.add(
            f"{comm} needs num_kv_heads to be a multiple of {problems.shown('parallel.tp')} * "
            f"{problems.shown('parallel.cp')} = {unit}, got "
            f'{problems.shown("model.num_kv_heads")}; set cp_comm = "allgather"'
        )


def _check_experts(problems: ConfigErrors, config: ResolvedConfig) -> None:
    moe, parallel = config.moe, config.parallel
    if moe.num_experts == 0:
        for key, needs in (("ep", parallel.ep > 1), ("etp", parallel.etp not in (1, parallel.tp))):
            if needs:
                problems.add(
                    f"{problems.shown(f'parallel.{key}')} is for experts, but "
                    f"{problems.shown('moe.num_experts')}; leave {key} out, or set num_experts"
                )
        return
    for key, axis in (("num_experts", "ep"), ("ffn_hidden_size", "etp")):
        value, size = getattr(moe, key), getattr(parallel, axis)
        if value % size:
            problems.add(
                f"{problems.shown(f'moe.{key}')} is not a multiple of "
                f"{problems.shown(f'parallel.{axis}')}; nearest: "
                f"{axis}={nearest_divisors(size, value)}, or {key}={nearest_multiples(value, size)}"
            )
    if moe.shared_ffn_hidden_size % parallel.tp:
        problems.add(
            f"{problems.shown('moe.shared_ffn_hidden_size')} is not a multiple of "
            f"{problems.shown('parallel.tp')}; nearest: "
            f"{nearest_multiples(moe.shared_ffn_hidden_size, parallel.tp)}"
        )
    if moe.echo.domain_size is not None and parallel.ep % moe.echo.domain_size:
        problems.add(
            f"{problems.shown('moe.echo.domain_size')} does not divide "
            f"{problems.shown('parallel.ep')}; nearest: "
            f"domain_size={nearest_divisors(moe.echo.domain_size, parallel.ep)}"
        )
    _check_shares_of_tokens(problems, config)
    if not moe.moe_layers(config.model.num_layers):
        problems.add(
            f"{problems.shown('moe.num_experts')}, but none of the {config.model.num_layers} "
            f"layers has experts: {problems.shown('moe.layer_pattern')}; change it"
        )
    _check_expert_layout(problems, config)


def _check_shares_of_tokens(problems: ConfigErrors, config: ResolvedConfig) -> None:
    """Check the sequence length: tp ranks with the same tokens route equal shares of them."""
    parallel, length = config.parallel, config.model.seq_length
    slices = 2 * parallel.cp if parallel.cp > 1 else 1
    unit = parallel.tp * slices
    # _check_sequence_fits_cp reports lengths that the slices alone do not fit.
    if parallel.sequence_parallel or length % slices or length % unit == 0:
        return
    factors = problems.shown("parallel.tp") + (
        f" * 2 * {problems.shown('parallel.cp')} = {unit}" if slices > 1 else ""
    )
    problems.add(
        f"{problems.shown('model.seq_length')} is not a multiple of {factors}: the ranks of tp "
        f"share the tokens that they route; nearest: {nearest_multiples(length, unit)}"
    )


def _check_expert_layout(problems: ConfigErrors, config: ResolvedConfig) -> None:
    parallel, world = config.parallel, problems.world_size
    etp = parallel.etp
    product = etp * parallel.ep * parallel.pp
    if world % (parallel.tp * parallel.cp * parallel.pp) == 0 and world % product:
        legal = [ep for ep in divisors(config.moe.num_experts) if problems.accepts(world, ep=ep)]
        fixes = [f"ep={nearest_of(legal, parallel.ep)}"] if legal else []
        if counts := _nearest_worlds(problems, product):
            fixes.append(f"start {counts} processes")
        problems.add(
            f"the experts do not fit {count_of(world, 'process')} ({problems.launcher}): "
            f"{problems.shown('parallel.etp')} x {problems.shown('parallel.ep')} x "
            f"{problems.shown('parallel.pp')} = {product}, and {world} is not a multiple of it"
            + (f"; nearest: {', or '.join(fixes)}" if fixes else "; change one of them")
        )


def _check_batch(problems: ConfigErrors, config: ResolvedConfig) -> None:
    dp = config.dp(problems.world_size)
    if dp == 0 or problems.world_size % dp:
        return  # The layout itself is invalid and already reported.
    unit = config.train.microbatch_size * dp
    batch = config.train.global_batch_size
    if batch % unit:
        other = ""
        if batch % dp == 0:
            sizes = nearest_divisors(config.train.microbatch_size, batch // dp)
            other = f", or train.microbatch_size = {sizes}"
        problems.add(
            f"{problems.shown('train.global_batch_size')} is not a multiple of "
            f"{problems.shown('train.microbatch_size')} x dp {dp} "
            f"({count_of(problems.world_size, 'process')} / tp*cp*pp) = {unit}; "
            f"nearest: {nearest_multiples(batch, unit)}{other}"
        )


def _check_instances(problems: ConfigErrors, config: ResolvedConfig) -> None:
    """Check that the instances divide the number of ranks that hold the same parameters."""
    cp, copies = config.parallel.cp, config.pipeline.copies
    dense, experts = config.holders(problems.world_size)
    of_copies = f" x {copies} copies of the model" if copies > 1 else ""
    of_cp = f" x cp {cp}" if cp > 1 else ""
    holders = {f"dp {config.dp(problems.world_size)}{of_cp}{of_copies}": dense}
    if config.moe.num_experts > 0:
        holders[f"edp {experts // copies}{of_copies}"] = experts
    # One number of instances must divide all of these counts.
    legal, count = divisors(math.gcd(*holders.values())), config.optimizer.sharded_instances
    for text, number in holders.items():
        if number % count:
            problems.add(
                f"{problems.shown('optimizer.num_instances')} does not divide {number}, the number "
                f"of ranks that hold the same parameters ({text}); nearest: "
                f"{nearest_of(legal, count)}"
            )


LAYOUT_RULES = (
    _check_layout,
    _check_experts,
    _check_model_fits_tp,
    _check_sequence_fits_cp,
    _check_heads_fit_cp,
    _check_batch,
    _check_instances,
)
