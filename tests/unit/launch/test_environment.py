"""Rank numbers from the variables of torchrun and of srun."""

from __future__ import annotations

import pytest

from megacore.errors import ConfigError
from megatrain.launch.environment import external_launcher, first_host, launched_rank

# As `srun --nodes 2 --ntasks 6 --ntasks-per-node 4` sets them for the second task of the second
# node, in a job that was requeued once.
SRUN = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_RESTART_COUNT": "1",
}


def test_srun_gives_ranks_and_the_address_of_the_first_node() -> None:
    assert external_launcher(SRUN) == "srun"
    found = launched_rank(SRUN)
    assert (found.rank, found.world_size) == (5, 6)
    assert (found.local_rank, found.local_world_size) == (1, 2)
    assert (found.host, found.restarts, found.agent_hosts_store) == ("gpu08", 1, False)
    assert 20000 <= found.port < 30000


def test_the_port_is_that_of_the_step_and_can_be_chosen() -> None:
    others = [SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}]
    assert {launched_rank(env).port for env in others} == {launched_rank(SRUN).port}
    assert launched_rank(SRUN | {"SLURM_STEP_ID": "2"}).port != launched_rank(SRUN).port
    chosen = launched_rank(SRUN | {"MASTER_PORT": "1234", "MASTER_ADDR": "head"})
    assert (chosen.host, chosen.port) == ("head", 1234)


def test_torchrun_under_srun_wins() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    found = launched_rank(SRUN | torchrun | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert (found.launcher, found.rank, found.world_size) == ("torchrun", 1, 2)
    assert (found.attempt, found.restarts) == (2, 3)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a script of sbatch
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},  # srun megacore train --nproc 8
    ],
)
def test_one_process_is_no_rank(environ: dict[str, str]) -> None:
    assert external_launcher(environ) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "3"}, "--distribution=block"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,4"}, "contradicts SLURM_STEP_NUM_TASKS=6"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x"}, r"must be like 8\(x2\),4"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x99999999999)"}, "must be like"),
        ({"SLURM_STEP_NODELIST": ""}, "set MASTER_ADDR"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID must be an integer, got 'x'"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launched_rank(SRUN | changes)


def test_missing_variables_are_named() -> None:
    with pytest.raises(ConfigError, match="MASTER_PORT must be an integer, got ''"):
        launched_rank({"RANK": "0", "WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("node1", "node1"), ("n[1,3-5]", "n1"), ("a-[09-11],b", "a-09"), ("x.y.z,u", "x.y.z")],
)
def test_first_host_of_a_compressed_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
