"""A trainer on two machines: the training of one, and an end that names who is gone.

Both are this one, at its loopback address or in two network namespaces.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from async_grpo.roles.replay import checkpoint_digest
from kit.namespaces import two_namespaces, why_no_namespaces
from kit.runs import IN_MID_BATCH, SETUP, Command, audited, command, finish, read, steps_logged
from kit.several_ranks import EXAMPLES, figures, ranks, same_training, same_weights
from kit.waiting import until_gone

SAVED = "checkpoints/checkpoint-8/rollout_state.json"
SHARDED, CRITIC, TASKS = (SETUP.with_name(f"{name}.py") for name in ("sharded_model", "ppo_model", "several_tasks"))
DDP, FSDP2 = "ddp.yaml", "fsdp2.yaml"
ENV = {"TEST_GRPO": json.dumps(IN_MID_BATCH)}


@contextmanager
def two_machines(
    folder: Path,
    *options: str,
    setup: Path = SETUP,
    example: str = DDP,
    ranks_each: int = 1,
    within: Sequence[Sequence[str]] = ((), ()),
    host: str = "127.0.0.1",
    **env: str,
) -> Iterator[tuple[Command, Command]]:
    """The same command on each; machine 0 has the launcher. `within`: a command that runs it, of each machine."""
    config = folder / "two.yaml"
    config.write_text(
        (EXAMPLES / example)
        .read_text()
        .replace("num_machines: 1", "num_machines: 2")
        .replace("num_processes: 2", f"num_processes: {2 * ranks_each}")
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"{host}:{probe.getsockname()[1]}"
    arguments = ["train", str(setup), "-n", "1", "--deterministic", "--accelerate-config", str(config), *options]
    arguments += ["--main-process", address, "--machine-rank"]
    with (
        command(*arguments, "1", cwd=folder, within=within[1], **env) as other,
        command(*arguments, "0", cwd=folder, within=within[0], **env) as first,
    ):
        yield first, other


def family(*machines: Command) -> list[psutil.Process]:
    return [process for machine in machines for process in machine.children()]


def test_two_machines_train_as_one_process_does_and_a_rank_that_dies_is_named_on_both(
    undisturbed: Path, tmp_path: Path
) -> None:
    """The rest of the run is on one machine, then on two again, which a Ctrl-C on the other one stops."""
    forever = ("--steps", "100000")
    with two_machines(tmp_path, *forever, **ENV) as (first, other):
        first.wait_until((tmp_path / SAVED).exists, "a checkpoint")
        everybody = family(first, other)
        ranks(other)[0].kill()
        assert other.wait() == 9 and first.wait() != 0
    until_gone(everybody)
    named = f"rank 1 on machine 1 ({socket.gethostname()}) ended with exit code -9"
    assert named in first.output and named in read(tmp_path / "worker/run.json")["why"]
    assert read(tmp_path / "worker/run.json")["state"] == "failed"

    step = max(steps_logged(tmp_path / "worker"))
    alone = ("--accelerate-config", str(EXAMPLES / DDP))
    with command("train", str(SETUP), "--resume", *alone, "--steps", str(step + 3), cwd=tmp_path, **ENV) as run:
        assert run.wait() == 0, run.output

    with two_machines(tmp_path, "--resume", *forever, **ENV) as (first, other):
        first.wait_until(lambda: max(steps_logged(tmp_path / "worker")) > step + 5, "steps after the resume")
        everybody = family(first, other)
        os.kill(other.process.pid, signal.SIGINT)
        assert (first.wait(), other.wait()) == (0, 0), first.output + other.output
    until_gone(everybody)
    assert read(tmp_path / "worker/run.json")["state"] == "stopped"
    audited(tmp_path / "worker")
    same_training(tmp_path, undisturbed, steps=11)
    same_weights(tmp_path, undisturbed, 4, 8)


@pytest.mark.slow
def test_a_stop_while_the_ranks_load_is_what_the_other_machine_says(tmp_path: Path) -> None:
    setup = tmp_path / "loads_for_long.py"
    loads = (
        "import os, pathlib, time\nif 'RANK' in os.environ:\n    pathlib.Path(f'rank{os.environ[\"RANK\"]}').touch()\n"
    )
    setup.write_text(f"{loads}    time.sleep(1000)\n{SETUP.read_text()}")
    with two_machines(tmp_path, setup=setup) as (first, other):
        first.wait_until(lambda: all((tmp_path / f"rank{number}").exists() for number in range(2)), "both to load")
        os.kill(first.process.pid, signal.SIGINT)
        assert first.wait() == 130 and other.wait() != 0
    assert f"machine 0 ({socket.gethostname()}) was asked to end" in other.output


@pytest.mark.slow
def test_the_rank_that_died_is_named_where_each_machine_has_two(tmp_path: Path) -> None:
    """Its neighbours die of it, and none of them is named."""
    with two_machines(tmp_path, "--steps", "100000", ranks_each=2) as (first, other):
        first.wait_until(lambda: steps_logged(tmp_path / "worker"), "a step")
        dead = ranks(other)[1]
        dead.kill()
        assert first.wait() != 0 and other.wait() != 0
    named = f"rank 3 on machine 1 ({socket.gethostname()}) (pid {dead.pid}) has died"
    assert named in read(tmp_path / "worker/run.json")["why"] and named in first.output and named in other.output


def test_fsdp2_on_two_machines_trains_as_one_process_does(undisturbed: Path, tmp_path: Path) -> None:
    """No rank has the whole weights: they are gathered from both for each version, and written together."""
    with two_machines(tmp_path, "--steps", "8", setup=SHARDED, example=FSDP2, **ENV) as (first, other):
        assert (first.wait(), other.wait()) == (0, 0), first.output + other.output
    same_training(tmp_path, undisturbed, steps=8)
    shards = {path.name for path in (tmp_path / "checkpoints/checkpoint-8/pytorch_model_fsdp_0").glob("*.distcp")}
    assert shards == {"__0_0.distcp", "__1_0.distcp"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "example", "options", "env"),
    [
        (SETUP, DDP, (), {"TEST_GRPO": json.dumps({"num_generations": 16, "scale_rewards": "batch"})}),
        (SHARDED, FSDP2, ("--train-of-group", "2"), ENV),
        (CRITIC, FSDP2, (), {**ENV, "TEST_SHARDED": "1"}),
        (TASKS, DDP, (), {}),
    ],
    ids=["a group on both", "a part of each group, sharded", "critic, sharded", "tasks"],
)
def test_two_machines_train_as_two_ranks_of_one_to_the_last_bit(
    setup: Path, example: str, options: tuple[str, ...], env: dict[str, str], tmp_path: Path
) -> None:
    steps, one, two = ("--steps", "8", *options), tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    local = ("-n", "1", "--deterministic", "--accelerate-config", str(EXAMPLES / example))
    finish(one, *local, *steps, setup=setup, **env)
    with two_machines(two, *steps, setup=setup, example=example, **env) as (first, other):
        assert (first.wait(), other.wait()) == (0, 0), first.output + other.output
    assert figures(two) == figures(one)
    assert sum(step["grad_norm"] > 0.1 for step in figures(one).values()) > 3, "the comparison must see gradients"
    for weights in ("", "critic") if setup == CRITIC else ("",):
        saved = [folder / "checkpoints/checkpoint-8" / weights for folder in (one, two)]
        assert checkpoint_digest(saved[0]) == checkpoint_digest(saved[1])


@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0,
    reason="no namespaces of mounts here",
)
def test_a_folder_of_checkpoints_that_the_machines_do_not_share_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    hidden = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder))
    with two_machines(tmp_path, "--steps", "2", within=((), hidden)) as (first, other):
        assert first.wait() == 2, first.output
        assert other.wait() == 0, other.output
    assert f"Ranks 0, 1 do not see what the others write into {folder}" in first.output
    assert "let output_dir of the GRPOConfig be a folder that all machines share" in first.output
    assert not [*folder.glob(".seen-by-rank-*")]


@pytest.fixture
def link() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link, 10.43.0.1 and 10.43.0.2."""
    if why := why_no_namespaces():
        pytest.skip(why)
    with two_namespaces() as names:
        yield names


@pytest.mark.slow
def test_the_doctor_names_the_link_between_two_machines_and_a_machine_behind_one_that_is_down(
    link: tuple[str, str], tmp_path: Path
) -> None:
    (config := tmp_path / "two.yaml").write_text(json.dumps({"num_machines": 2, "num_processes": 2}))
    arguments = ["doctor", "--json", "--accelerate-config", str(config), "--main-process", "10.43.0.1:29500"]

    def found(number: int, *options: str) -> Command:
        rank = ("--machine-rank", str(number), *options)
        return Command([*arguments, *rank], tmp_path, within=("ip", "netns", "exec", link[number]))

    both = [found(0), found(1)]
    for doctor in both:
        assert doctor.wait() == 0, doctor.output
        assert "64 MB to all others by gloo on eth0: " in doctor.output
    subprocess.run(["ip", "-n", link[1], "link", "set", "eth0", "down"], check=True)
    alone = found(0, "--node-wait", "5")
    assert alone.wait() == 1 and "of --machine-rank 1 nothing was heard within 5 s" in alone.output, alone.output


@pytest.mark.slow
@pytest.mark.parametrize("what", ["link", "machine 0", "machine 1"])
def test_a_link_or_a_machine_that_goes_down_ends_what_is_left_with_the_name_of_the_other(
    what: str, link: tuple[str, str], tmp_path: Path
) -> None:
    within = [("ip", "netns", "exec", name) for name in link]
    with two_machines(tmp_path, "--steps", "100000", within=within, host="10.43.0.1", **ENV) as (first, other):
        first.wait_until((tmp_path / SAVED).exists, "a checkpoint")
        everybody = family(first, other)
        if what == "link":
            subprocess.run(["ip", "-n", link[1], "link", "set", "eth0", "down"], check=True)
        else:
            lost = first if what == "machine 0" else other
            for process in (*lost.children(), lost.process):
                process.kill()
        assert first.wait() != 0 and other.wait() != 0
    until_gone(everybody)
    if what != "machine 0":
        missed = f"machine 1 ({socket.gethostname()}) has not answered for 25 s"
        assert missed in first.output and missed in read(tmp_path / "worker/run.json")["why"]
    if what != "machine 1":
        assert "machine 0 (10.43.0.1:" in other.output and "cannot be reached for 25 s" in other.output


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "survives"), [(12, True), (90, False)])
def test_a_machine_that_is_frozen_for_long_ends_the_run_and_a_short_stop_does_not(
    tmp_path: Path, seconds: float, survives: bool
) -> None:
    """The terminal of the machine that goes on is closed in the end, which stops the run as Ctrl-C does."""
    with two_machines(tmp_path, "--steps", "100000", **ENV) as (first, other):
        first.wait_until((tmp_path / SAVED).exists, "a checkpoint")
        frozen = [psutil.Process(other.process.pid), *other.children()]
        for process in frozen:
            process.suspend()
        began = time.monotonic()
        while time.monotonic() - began < seconds and first.process.poll() is None:
            time.sleep(0.1)
        for process in frozen:
            process.resume()
        if survives:
            step = max(steps_logged(tmp_path / "worker"))
            first.wait_until(lambda: max(steps_logged(tmp_path / "worker")) > step + 3, "steps after it")
            os.kill(other.process.pid, signal.SIGHUP)
            assert (first.wait(), other.wait()) == (0, 0), first.output + other.output
            assert read(tmp_path / "worker/run.json")["state"] == "stopped"
            return
        assert first.wait() != 0 and other.wait() != 0
    until_gone(frozen[1:])
    assert f"machine 1 ({socket.gethostname()}) has not answered for 25 s" in read(tmp_path / "worker/run.json")["why"]
