"""One rank that profiles a step: ``trace_worker.py RANK WORLD_SIZE FOLDER on|off gloo|shared``.

Not forked from the test process: torch's profiler does not survive a fork.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatrain.train.trainer import build_trainer
from tests.dist.test_invariance import make_config


def main(rank: int, world_size: int, folder: Path, *, overlap: bool, shared: bool) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    config = make_config(
        world_size,
        {
            "optimizer.bucket_numel": 4000,
            "optimizer.overlap": "all" if overlap else "none",
            "run.host_memory": shared,
        },
    )
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    for step in range(2):
        trainer.train_step(step)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        trainer.train_step(2)
        # Gloo's threads record into the profiler: it must not end before their work.
        trainer.optimizer.finish_param_gather()
    events = [
        {"name": event.name, "start": event.time_range.start, "end": event.time_range.end}
        for event in trace.events()
    ]
    (folder / f"trace{rank}.json").write_text(json.dumps(events))
    dist.barrier()


if __name__ == "__main__":
    number, size, where, on, way = sys.argv[1:]
    main(int(number), int(size), Path(where), overlap=on == "on", shared=way == "shared")
