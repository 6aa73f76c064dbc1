"""``megacore train CONFIG.toml``: train a model, with local ranks or as one rank of torchrun."""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.errors import ConfigError, MegacoreError
from megatrain.cli.values import refuse_given, whole_number
from megatrain.config import (
    Config,
    ParallelConfig,
    ResolvedConfig,
    RunConfig,
    load_config,
    resolve,
)
from megatrain.launch.environment import external_launcher, launched_rank

if TYPE_CHECKING:
    from megatrain.config.resolved import ResolvedRunConfig
    from megatrain.launch.start import LaunchOptions, RankContext

EPILOG = """\
Every setting of the file can be changed: --train.steps=20 --parallel.pp 2 --run.plain
(docs/configuration.md lists them all). Under torchrun and srun the command joins their ranks.
"""


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "train",
        description="Train the model described by a TOML file.",
        usage="megacore train CONFIG [--nproc N] [--section.key=value ...]\n"
        "       megacore train CONFIG --dry-run [--world-size N] [--rank R] [--device NAME]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="TOML file")
    parser.add_argument(
        "--nproc", metavar="N", help="processes to start on this machine (as --run.nproc=N)"
    )
    group = parser.add_argument_group("dry run (needs no GPU and no peers)")
    group.add_argument(
        "--dry-run", action="store_true", help="run two steps of one rank without values"
    )
    group.add_argument("--world-size", metavar="N", help="processes of the whole run")
    group.add_argument(
        "--device", metavar="NAME", help="a GPU, such as h100, whose branches are run too"
    )
    group.add_argument("--rank", metavar="R", type=whole_number, help="the rank (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Validate the configuration as far as possible, then start or join the ranks."""
    if args.dry_run:
        return _dry_run(args)
    refuse_given(args, ("world_size", "rank", "device"), "{} belongs to a dry run; add --dry-run")
    launcher = external_launcher(os.environ)
    return _start(args) if launcher is None else _join(args, launcher)


def _dry_run(args: argparse.Namespace) -> int:
    """Run two steps of one rank on torch's meta device; return 1 if they fail."""
    if args.world_size is not None:
        args.nproc = args.world_size
    loaded = load_with_nproc(args, option="--world-size")
    world_size, rank = loaded.run.nproc or fewest_ranks(loaded.parallel), args.rank or 0
    if rank >= world_size:
        raise ConfigError(f"--rank must be in [0, {world_size}), got {rank}")
    config = resolve_for_training(
        loaded,
        world_size,
        launcher="--world-size",
        vocab_size=loaded.model.vocab_size,
        cuda=None if args.device is None else True,
    )

    from megatrain.dry_run import CAPABILITIES, dry_run, dry_run_text

    device = None if args.device is None else args.device.lower()
    if device is not None and device not in CAPABILITIES:
        raise ConfigError(f"--device must be one of {', '.join(CAPABILITIES)}, got {args.device}")
    _check_operations(config)
    found = dry_run(config, world_size=world_size, rank=rank, device=device)
    print(dry_run_text(found))
    return 0 if found.works else 1


def load_with_nproc(args: argparse.Namespace, *, option: str) -> Config:
    """Load the configuration of a command line; ``option`` is the flag of ``args.nproc``.

    Raises:
        ConfigError: As in `load_config`.
    """
    if args.nproc is None:
        return load_config(args.config, args.settings)
    settings = [*args.settings, ("run.nproc", args.nproc)]
    return load_config(args.config, settings, flags={"run.nproc": f"{option}={args.nproc}"})


def _start(args: argparse.Namespace) -> int:
    threads = prepare_environment(debug=args.debug)
    loaded = load_with_nproc(args, option="--nproc")
    if sys.stdout.isatty():
        # The import of torch takes a second, and more on a busy machine.
        print(f"starting  {args.config}", flush=True)
    with _imports():
        world_size = loaded.run.nproc or default_nproc(loaded.run, loaded.parallel)
        config = resolve_for_training(loaded, world_size, launcher="--nproc")
        check_start(config)

        # Before the fork, so that ranks share the memory of the modules.
        import megatrain.train.loop  # noqa: F401
        from megatrain.launch.start import run_ranks_local
    options = launch_options(config.run, threads=threads, debug=args.debug)
    return run_ranks_local(world_size, partial(train_rank, config), options=options)


def _join(args: argparse.Namespace, launcher: str) -> int:
    rank = launched_rank(os.environ)
    source = f"{launcher}, {'WORLD_SIZE' if launcher == 'torchrun' else 'SLURM_STEP_NUM_TASKS'}"
    threads = prepare_environment(debug=args.debug)
    try:
        loaded = load_with_nproc(args, option="--nproc")
        _check_nproc(loaded, rank.world_size, launcher=source)
        with _imports():
            config = resolve_for_training(loaded, rank.world_size, launcher=source)
            check_start(config)
    except MegacoreError:
        if rank.rank != 0:
            # Every rank finds the same error. Only rank 0 reports it; other ranks wait a moment,
            # because the launcher kills all ranks when the first one exits.
            time.sleep(2.0)
            os._exit(2)
        raise

    from megatrain.launch.start import run_under_torchrun

    options = launch_options(config.run, threads=threads, debug=args.debug)
    return run_under_torchrun(partial(train_rank, config), options=options)


def _check_nproc(config: Config, world_size: int, *, launcher: str) -> None:
    """Check that the configured process count is that of the launcher."""
    nproc = config.run.nproc
    if nproc not in (None, world_size):
        raise ConfigError(
            f"run.nproc = {nproc} ({config.origin('run.nproc')}), but the launcher started "
            f"{world_size} ({launcher}); leave run.nproc out (--run.nproc=none) or start {nproc}"
        )


def check_start(config: Config) -> None:
    """Check that there are data, and GPUs if the backend needs them."""
    import torch

    if config.data.factory is None:
        _ = config.data.training_sources  # refuses none

    _check_operations(config)
    if config.run.backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            f"run.backend = nccl ({config.origin('run.backend')}) needs GPUs, but torch sees "
            "none on this machine; use --run.backend=gloo"
        )


def _check_operations(config: Config) -> None:
    """Check the names of `run.torch_operations`."""
    from megacore.qualification import check_names

    try:
        check_names(config.run.torch_operations)
    except ValueError as error:
        origin = config.origin("run.torch_operations")
        raise ConfigError(f"run.torch_operations ({origin}): {error}") from error


def train_rank(config: ResolvedConfig, context: RankContext) -> int:
    """Run the training on one rank."""
    from megatrain.launch.context import agree
    from megatrain.train.loop import train

    digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]
    agree(context, "the configuration", digest)
    return train(config, context)


def resolve_for_training(
    config: Config,
    world_size: int,
    *,
    launcher: str,
    vocab_size: int | None = None,
    cuda: bool | None = None,
) -> ResolvedConfig:
    """Resolve ``config`` and check its layout, schedule and tokenizer in this process.

    With ``vocab_size``, the tokenizer is not read; for ``cuda`` see `resolve`.

    Raises:
        ConfigError: For an invalid setting.
        DataError: If the tokenizer cannot be read.
    """

    def size_of_tokenizer() -> int:
        from megatrain.data import load_tokenizer

        return load_tokenizer(config.data.tokenizer).vocab_size

    size = size_of_tokenizer if vocab_size is None else vocab_size
    resolved = resolve(config, world_size, vocab_size=size, cuda=cuda, launcher=launcher)

    from megatrain.plan.run_plan import check_plan

    check_plan(resolved, world_size)
    return resolved


def default_nproc(run: RunConfig, parallel: ParallelConfig) -> int:
    """Return the default process count: one per GPU, else the fewest that the layout allows."""
    import torch

    if run.backend != "gloo" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return fewest_ranks(parallel)


def fewest_ranks(parallel: ParallelConfig) -> int:
    """Return the smallest process count that the layout allows.

    Example:
        >>> fewest_ranks(ParallelConfig(pp=2, ep=2))
        4
    """
    etp = parallel.tp if parallel.etp is None else parallel.etp
    return parallel.pp * math.lcm(parallel.tp * parallel.cp, etp * parallel.ep)


def prepare_environment(*, debug: bool) -> int | None:
    """Set environment variables read at the import of torch; return the user's thread count."""
    asked = os.environ.get("OMP_NUM_THREADS")
    # A parent with more OpenMP threads cannot fork ranks safely; each rank sets its own count.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not debug:
        # Connections break when a rank is lost. The monitor reports it; torch's stack dumps add
        # nothing.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    return int(asked) if asked is not None and asked.isdecimal() else None


@contextmanager
def _imports() -> Iterator[None]:
    """Import modules without garbage collection, and leave what they made out of later ones.

    Modules of torch are half a million objects: to look for garbage among them takes a fifth of the
    time of the imports, and in a forked rank copies their pages.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def launch_options(run: ResolvedRunConfig, *, threads: int | None, debug: bool) -> LaunchOptions:
    """Return the options for starting the ranks of a run."""
    from megatrain.launch.start import LaunchOptions

    return LaunchOptions(
        backend=run.backend,
        timeout_s=run.timeout_s,
        peer_timeout_s=run.peer_timeout_s,
        error_dir=Path(run.dir),
        debug=debug,
        threads=threads,
    )
