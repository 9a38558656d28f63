"""A run directory as a parameter server and its workers leave it, with text in it, for the tests of its readers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.archive import checkpoint_folders
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.queue import ServerQueue
from async_grpo.queue.codec import encode_group
from async_grpo.records import Timings
from async_grpo.rundir.paths import RunDir, RunState
from kit.groups import make_group, make_job
from kit.plans import planned

RUN = "0123456789ab"
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> \" ' & &lt; "
    "\x00\x1b[31m\u202egnirts\u202c \u0645\u0631\u062d\u0628\u0627 \ud800 <!-- ]]> {{data}} $& \u2028 end"
)


class ArchivedRun:
    """Groups of two completions and two reward functions; `use` is an optimizer step."""

    def __init__(self, root: Path, *, state: str = "stopped", **more: Any) -> None:
        self.root = root / "worker"
        ServerQueue.open(self.root, RUN, watch_workers=False).close()
        self.run = RunDir(self.root)
        self.run.write_state(RunState(run_id=RUN, state=state, plan=planned(), started="", **more))
        self.begin(None)

    def begin(self, resumed_from: int | None, max_staleness: int = 4) -> None:
        self.line(run_id=RUN, resumed_from=resumed_from, max_staleness=max_staleness)

    def line(self, **entry: Any) -> None:
        with self.run.consumption.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def log(self, step: int, **values: float) -> None:
        with self.run.metrics.open("a") as file:
            file.write(json.dumps({"step": step, "monotonic_s": 0.1, **values}) + "\n")

    def use(self, step: int, seqs: list[int], version: int | None = None, **group: Any) -> None:
        """One optimizer step, by default with rollouts that are one version old, and its line of metrics."""
        version = max(0, step - 2) if version is None else version
        for seq in seqs:
            self.group(seq, version, **group)
        self.line(step=step, version_used=step - 1, seqs=seqs, policy_versions=[version] * len(seqs))
        self.log(step, loss=0.5, reward=step / 10, **{"async/rollouts_per_second": 8.0, "completions/mean_length": 2.5})

    def group(
        self,
        seq: int,
        version: int = 0,
        *,
        rewards: Any = ((1.0, 0.5), (0.0, 0.5)),
        completions: Any = None,
        folder: str = "done",
        prompt: Any = None,
        **fields: Any,
    ) -> Path:
        worker = 1 + seq % 2
        row = {"prompt": prompt or f"question {seq}", "answer": f"answer {seq}"}
        made = make_group(
            make_job(seq, run_id=RUN, row=row, seed=0),
            version,
            worker=f"dev{worker}",
            reward_names=("right", "format"),
            completion_lengths=np.array([2, 3], np.int32),
            completion_ids=np.arange(5, dtype=np.int32),
            sampling_logprobs=np.full(5, -1.0, np.float32),
            rewards=np.array(rewards, np.float32),
            completions=completions or [f"good reply {seq}", f"bad reply {seq}"],
            timings=Timings(adopt_s=0.1, generate_s=0.5, score_s=0.2, queue_s=0.01),
        )
        shard = self.root / folder / f"{seq // 1000:07d}" if folder == "done" else self.root / folder
        shard.mkdir(parents=True, exist_ok=True)
        path = shard / f"{seq:010d}.a00_complete_from_dev{worker}.safetensors"
        path.write_bytes(encode_group(replace(made, **fields)))
        os.utime(path, (1_800_000_000 + seq, 1_800_000_000 + seq))
        return path


def three_steps(root: Path, **options: Any) -> ArchivedRun:
    """Three steps of two groups, and one group that waits."""
    run = ArchivedRun(root, **options)
    for step in (1, 2, 3):
        run.use(step, [2 * step - 2, 2 * step - 1])
    run.group(6, 3, folder="queue")
    return run


def save_checkpoint(output_dir: Path, run_id: str, step: int, weights: bytes = b"weights", run_dir: str = "") -> Path:
    """Save a checkpoint as a run does."""
    folder = checkpoint_folders.staging(output_dir, run_id)
    checkpoint_folders.start_saving(folder)
    written = folder / f"checkpoint-{step}"
    written.mkdir()
    (written / "model.safetensors").write_bytes(weights)
    state = RolloutState(
        run_id=run_id, step=step, next_seq=9, rounds=3, unusable=[2], consumed_below=4, consumed=[6], run_dir=run_dir
    )
    checkpoint_folders.save(written, state)
    return checkpoint_folders.put_in_place(written, output_dir, run_id)
