"""A trainer on two machines: the training of one, and an end that names who is gone.

Both are this one, at its loopback address.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kit.runs import IN_MID_BATCH, SETUP, Command, audited, command, read, steps_logged
from kit.several_ranks import EXAMPLES, ranks, same_training, same_weights
from kit.waiting import until_gone

pytestmark = pytest.mark.integration

ENV = {"TEST_GRPO": json.dumps(IN_MID_BATCH)}


@contextmanager
def two_machines(
    folder: Path, *options: str, example: str = "ddp.yaml", **env: str
) -> Iterator[tuple[Command, Command]]:
    """The same command on each, in one folder; machine 0 has the launcher."""
    config = folder / f"two_{example}"
    config.write_text((EXAMPLES / example).read_text().replace("num_machines: 1", "num_machines: 2"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    arguments = ["train", str(SETUP), "-n", "1", "--deterministic", "--accelerate-config", str(config), *options]
    arguments += ["--main-process", address, "--machine-rank"]
    with command(*arguments, "1", cwd=folder, **env) as other, command(*arguments, "0", cwd=folder, **env) as first:
        yield first, other


def family(*machines: Command) -> list[psutil.Process]:
    return [process for machine in machines for process in machine.children()]


def test_two_machines_train_as_one_process_does_and_a_rank_that_dies_is_named_on_both(
    undisturbed: Path, tmp_path: Path
) -> None:
    """The rest of the run is on one machine, then on two again, which a Ctrl-C on the other one stops."""
    forever = ("--steps", "100000")
    with two_machines(tmp_path, *forever, **ENV) as (first, other):
        saved = tmp_path / "checkpoints/checkpoint-8/rollout_state.json"
        first.wait_until(saved.exists, "a checkpoint")
        everybody = family(first, other)
        ranks(other)[0].kill()
        assert other.wait() == 9 and first.wait() != 0
    until_gone(everybody)
    named = f"rank 1 on machine 1 ({socket.gethostname()}) ended with exit code -9"
    assert named in first.output and named in read(tmp_path / "worker/run.json")["why"]
    assert read(tmp_path / "worker/run.json")["state"] == "failed"

    step = max(steps_logged(tmp_path / "worker"))
    alone = ("--accelerate-config", str(EXAMPLES / "ddp.yaml"))
    with command("train", str(SETUP), "--resume", *alone, "--steps", str(step + 3), cwd=tmp_path, **ENV) as run:
        assert run.wait() == 0, run.output

    with two_machines(tmp_path, "--resume", *forever, **ENV) as (first, other):
        first.wait_until(lambda: max(steps_logged(tmp_path / "worker")) > step + 5, "steps after the resume")
        everybody = family(first, other)
        os.kill(other.process.pid, signal.SIGINT)
        assert first.wait() == 0, first.output
        assert other.wait() == 0, other.output
    until_gone(everybody)
    assert read(tmp_path / "worker/run.json")["state"] == "stopped"
    audited(tmp_path / "worker")
    same_training(tmp_path, undisturbed, steps=11)
    same_weights(tmp_path, undisturbed, 4, 8)
