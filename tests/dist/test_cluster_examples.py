"""The examples for clusters: their scripts run, with stand-ins for srun and scontrol."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import Job, start_command

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
STEPS = 30
CONFIG = """\
[model]
hidden_size = 32
num_layers = 4
num_heads = 4
seq_length = 16

[train]
steps = {steps}
microbatch_size = 1
global_batch_size = 8
eval_interval = 0

[data]
source = "{folder}/text.txt"

[run]
plain = true
backend = "gloo"
"""
# Starts two tasks with the variables that srun sets, passes no signal on, and returns the largest
# exit code.
SRUN = """\
#!{python}
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--") and "." not in word]
command = [word for word in sys.argv[1:] if word not in options]
assert "--distribution=block" in sys.argv
common = {{"SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2",
          "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}}
numbers = [{{"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}} for n in range(2)]
tasks = [subprocess.Popen(command, env=os.environ | common | each) for each in numbers]
open("{folder}/tasks", "w").write(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "config.toml").write_text(CONFIG.format(folder=tmp_path, steps=STEPS))
    return tmp_path


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _losses(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("}")]


def _wait_for_steps(run: Path, count: int) -> None:
    deadline = time.monotonic() + 90
    while len(_losses(run)) < count:
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.005)


def test_the_slurm_script_saves_requeues_and_continues(folder: Path) -> None:
    script, run = EXAMPLES / "slurm.sbatch", folder / "run"
    options = [line.split()[1] for line in script.read_text().splitlines() if "#SBATCH" in line[:8]]
    assert {"--requeue", "--signal=USR1@120", "--ntasks-per-node=8"} <= set(options)
    _script(folder / "bin" / "srun", SRUN.format(python=sys.executable, folder=folder))
    _script(folder / "bin" / "scontrol", f'#!/bin/sh\necho "$@" > {folder}/scontrol\n')
    _script(folder / "bin" / "megacore", f'#!/bin/sh\nexec {sys.executable} -m megacore "$@"\n')

    def start(restarts: int) -> Job:
        env = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_RESTART_COUNT": str(restarts),
        }
        arguments = [str(folder / "config.toml"), f"--run.dir={run}"]
        return start_command(["bash", str(script), *arguments], folder, env=env)

    job = start(0)
    _wait_for_steps(run, 4)
    for pid in (folder / "tasks").read_text().split():
        os.kill(int(pid), signal.SIGUSR1)  # as --signal=USR1@120 does
    ended = job.finish(timeout_s=60)
    assert ended.code == 75, ended.err
    assert (folder / "scontrol").read_text() == f"requeue {os.getpid()}\n"
    assert (run / "stopped").exists()
    (folder / "scontrol").unlink()
    ended = start(1).finish(timeout_s=90)
    assert ended.code == 0, ended.err
    assert "resumed   " in ended.out
    assert len(_losses(run)) == STEPS
    assert not (folder / "scontrol").exists()
    assert start_command(["bash", str(script)], folder).finish().code == 2


def _documents() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


def test_the_kubernetes_job_is_complete() -> None:
    service, job = _documents()
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    [container] = pod["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(env["NUM_NODES"])
    # The name of the first pod, with the subdomain of a service without an address.
    name, subdomain = job["metadata"]["name"], pod["subdomain"]
    assert env["MASTER_ADDR"] == f"{name}-0.{subdomain}"
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (subdomain, "None")
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert [each["port"] for each in service["spec"]["ports"]] == [int(env["MASTER_PORT"])]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(env["GPUS_PER_NODE"])
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in pod["volumes"]}


@pytest.mark.campaign
def test_the_pods_save_start_again_and_continue(folder: Path) -> None:
    _, job = _documents()
    text: str = job["spec"]["template"]["spec"]["containers"][0]["args"][0]
    run = folder / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = text.replace("/config/", f"{folder}/")
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NUM_NODES": "2",
        "GPUS_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RUN_DIR": str(run),
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def start() -> list[Job]:
        return [
            start_command(
                ["/bin/sh", "-c", text], folder, env=env | {"JOB_COMPLETION_INDEX": str(index)}
            )
            for index in range(2)
        ]

    pods = start()
    _wait_for_steps(run, 3)
    os.kill(pods[1].pid, signal.SIGTERM)
    ends = [pod.finish(timeout_s=90) for pod in pods]
    assert [ended.code for ended in ends] == [75, 75], ends
    done = len(_losses(run))
    assert done < STEPS
    ends = [pod.finish(timeout_s=90) for pod in start()]
    assert [ended.code for ended in ends] == [0, 0], ends
    assert len(_losses(run)) == STEPS
