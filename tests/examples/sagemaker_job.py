"""A job of the SageMaker example on this machine: its model, its environment and its command."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "sagemaker"
TINY = EXAMPLE.parent / "triviaqa_search"
DEADLINE_S = 300.0


def model_in(folder: Path) -> None:
    sys.path.insert(0, str(TINY))
    try:
        tiny = importlib.import_module("tiny")
    finally:
        sys.path.remove(str(TINY))
        sys.modules.pop("tiny", None)
    tokenizer = tiny.build_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny.build_model(tokenizer).save_pretrained(folder)


@contextmanager
def started(root: Path, log: Path, *, enter: Sequence[str] = (), **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job, which is killed at the end. Args: enter: what starts a command elsewhere, such as in a namespace."""
    texts = {"num_gpus": "0", "num_generations": "4", "grad_accum_steps": "1", "per_device_train_batch_size": "4"}
    texts |= {"num_iterations": "1", "max_completion_length": "24", "save_steps": "2", "max_steps": "40", **more}
    env: dict[str, Any] = {
        **os.environ,
        "SM_ROOT": str(root),
        "SM_HPS": json.dumps(texts),
        "SM_CHANNELS": '["model"]',
        "SM_CHANNEL_MODEL": str(root / "input" / "data" / "model"),
        "PYTHONPATH": f"{EXAMPLE.parents[1] / 'src'}:{os.environ.get('PYTHONPATH', '')}",
    }
    with log.open("wb") as output:
        job = subprocess.Popen([*enter, sys.executable, EXAMPLE / "train.py"], env=env, stdout=output, stderr=output)
    try:
        yield job
    finally:
        job.kill()


def until_found(condition: Callable[[], Any], job: subprocess.Popen[bytes], log: Path) -> None:
    """Wait while the job runs."""
    until(condition, deadline_s=DEADLINE_S, process=job, said=log.read_text)


def ends_well(root: Path, log: Path, **how: Any) -> None:
    """Start a job, and wait for its end."""
    with started(root, log, **how) as job:
        assert job.wait(DEADLINE_S) == 0, log.read_text()
