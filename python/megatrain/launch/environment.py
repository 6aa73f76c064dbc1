"""Rank numbers from the environment variables of torchrun and of SLURM's srun; without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megacore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LaunchedRank:
    """Rank numbers of a process that an external launcher has started.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Position among the ranks of this machine.
        local_world_size: Number of ranks of this machine.
        host: Host of the store.
        port: Port of the store.
        agent_hosts_store: Whether the launcher hosts the store; otherwise rank 0 does.
        attempt: Identifies this start among restarts of the launcher, which keep the store.
        restarts: Number of restarts by the launcher and by the job scheduler.
        launcher: ``"torchrun"`` also for others that set the same variables.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    agent_hosts_store: bool
    attempt: int
    restarts: int
    launcher: Literal["torchrun", "srun"]


def external_launcher(environ: Mapping[str, str]) -> Literal["torchrun", "srun"] | None:
    """Return the launcher that started this process as one of several ranks, if any."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "torchrun"
    # Set in the tasks of srun, but not in the script of sbatch.
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    return "srun" if tasks.isdecimal() and int(tasks) > 1 else None


def num_restarts(environ: Mapping[str, str]) -> int:
    """Return the number of restarts of this run by torchrun and by SLURM.

    Example:
        >>> num_restarts({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "1"})
        3
    """
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return sum(_number(environ, name, default=0) for name in names)


def launched_rank(environ: Mapping[str, str]) -> LaunchedRank:
    """Read the rank numbers of this process.

    Raises:
        ConfigError: If a variable is missing, not a number, or contradicts another one.
    """
    found = _from_slurm(environ) if external_launcher(environ) == "srun" else _from_torch(environ)
    if not 0 <= found.rank < found.world_size:
        rank, size = (
            ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
            if found.launcher == "srun"
            else ("RANK", "WORLD_SIZE")
        )
        raise ConfigError(
            f"{rank}={found.rank} is not in [0, {size}={found.world_size}); start "
            f"{found.world_size} processes with {rank} from 0 to {found.world_size - 1}"
        )
    return found


def _from_torch(environ: Mapping[str, str]) -> LaunchedRank:
    return LaunchedRank(
        rank=_number(environ, "RANK"),
        world_size=_number(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK", default=0),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", default=1),
        host=environ.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(environ, "MASTER_PORT"),
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        restarts=num_restarts(environ),
        launcher="torchrun",
    )


def _from_slurm(environ: Mapping[str, str]) -> LaunchedRank:
    rank, node = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NODEID", default=0)
    local_rank = _number(environ, "SLURM_LOCALID", default=0)
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS")
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)))
    if sum(per_node) != world_size or node >= len(per_node):
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')} contradicts "
            f"SLURM_STEP_NUM_TASKS={world_size} or SLURM_NODEID={node}"
        )
    if rank != sum(per_node[:node]) + local_rank:
        raise ConfigError(
            f"SLURM_PROCID={rank} is task {local_rank} of node {node}, but ranks of a node must be "
            f"consecutive; start them with srun --distribution=block"
        )
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job = _number(environ, "SLURM_JOB_ID", default=0)
    step = _number(environ, "SLURM_STEP_ID", default=0)
    return LaunchedRank(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=per_node[node],
        host=environ.get("MASTER_ADDR") or first_host(nodes),
        # Equal on all ranks, and different for the steps that share a node.
        port=_number(environ, "MASTER_PORT", default=20000 + (job * 16 + step) % 10000),
        agent_hosts_store=False,
        attempt=0,
        restarts=num_restarts(environ),
        launcher="srun",
    )


def tasks_per_node(text: str) -> list[int]:
    """Parse the number of tasks on each node of a step.

    Raises:
        ConfigError: If the text is invalid.

    Example:
        >>> tasks_per_node("8(x2),4")
        [8, 8, 4]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None or int(match[2] or 1) > 1 << 20:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text!r} must be like 8(x2),4")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's compressed list.

    Raises:
        ConfigError: If the list is empty or invalid.

    Example:
        >>> first_host("gpu[007-009,12],login"), first_host("a1,b2"), first_host("r[1-2]n[3-4]")
        ('gpu007', 'a1', 'r1n3')
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodes!r} names no host; set MASTER_ADDR to the host of rank 0"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name} must be an integer, got {text!r}; the launcher sets it"
        ) from None
