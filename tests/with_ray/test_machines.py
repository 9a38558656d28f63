"""Runs with nodes on machines that share nothing but a link: kills, lost links, a frozen machine, a lost head."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed here: `make test-nodes` makes an environment that has it")

from machines import Machine, Machines, claims_of, groups_of, machines, why_not

from async_grpo.archive.audit import Audit, audit
from async_grpo.telemetry.nodes_file import read_nodes
from kit import runs, waiting
from kit.runs import SETUP, Command, command
from kit.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason := why_not()), reason=f"no machines: {reason}")]

KILLS = int(os.environ.get("NODE_KILLS", "50"))
LINKS = int(os.environ.get("NODE_LINKS", "10"))
DOWN_S = 30.0
FROZEN_S = 60.0
BUSY_S = 900.0  # for what takes seconds where little else runs
GIVE_UP_S = 600.0  # Ray's own minute, and six tries to reach it
RUN = "worker"  # in the /tmp of the server's machine
EVER = ("--eval-every", "0", "--steps", "1000000", "--keep-done", "1000000")  # the audit here sees no checkpoint there
STRIKES = ("worker", "actor", "raylet", "worker", "actor", "gate", "worker", "actor", "raylet", "machine")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(runs, "DEADLINE_S", BUSY_S)
    monkeypatch.setattr(waiting, "DEADLINE_S", BUSY_S)
    with machines(3, tmp_path) as made:
        made.start_ray()
        yield made


class Training:
    """A run whose launcher is on the first machine."""

    def __init__(self, cluster: Machines, run: Command) -> None:
        self._cluster, self.run = cluster, run
        self.folder = cluster[0].folder / RUN

    def wait_for_groups(self, more: int = 8) -> None:
        had = groups_of(self.folder)
        self.run.wait_until(lambda: groups_of(self.folder) > had + more, f"{more} more groups")

    def alive(self) -> int:
        """Machines that are served now."""
        record = read_nodes(self.folder / "nodes.json")
        return 0 if record is None else record.alive

    def log(self) -> str:
        return (self.folder / "log_nodes.txt").read_text()

    def both_work(self) -> None:
        """Wait until each of the other machines has claims."""
        for name in ("dev1", "dev2"):
            self.run.wait_until(lambda name=name: claims_of(self.folder, name), f"claims of {name}")

    def stop(self) -> int:
        """Ask the launcher for a stop, and wait for its end."""
        (launcher,) = psutil.Process(self.run.process.pid).children()
        launcher.send_signal(signal.SIGINT)
        return self.run.wait()


@contextmanager
def training(cluster: Machines, *options: str, setup: Path = SETUP, **env: str) -> Iterator[Training]:
    one = cluster[0]
    arguments = ("train", str(setup), "--ray", "auto", "--workers-per-node", "1", *options)
    with command(*arguments, cwd=one.folder, within=one.enter(), **{"TEST_REWARD_S": "0.05", **one.env, **env}) as run:
        yield Training(cluster, run)


def judged(cluster: Machines, folder: Path, *, attempts: set[int] | None = None) -> Audit:
    """What every run here must leave: each group used once, and nothing of ours on any machine.

    Whatever the queue had to mend would be here: a duplicate, a file in quarantine, an attempt too many.
    """
    report = audit(folder)
    assert report.anomalies == [] and report.duplicates == 0, report
    assert not list((folder / "quarantine").glob("*")), "a healthy group was given up"
    assert report.attempts().keys() <= (attempts or {1}), report.attempts()
    for machine in cluster:
        until(lambda machine=machine: not machine.ours(), f"the end of {machine.name}'s processes")
        until(lambda machine=machine: not list(machine.folder.glob("async-grpo-*")), f"no files of {machine.name}")
    return report


def strike(what: str, cluster: Machines, machine: Machine) -> None:
    """Kill it, and start again what a person would have to start."""
    if what == "machine":
        machine.turn_off()
        cluster.turn_on(machine)
    elif what == "gate":
        until(lambda: cluster[0].having("async_grpo.cli nodes"), "the gate")[0].kill()
        return
    else:
        words = {"worker": "async_grpo.cli worker", "actor": "ray::FarNode", "raylet": "raylet/raylet"}[what]
        until(lambda: machine.having(words), f"{what} on {machine.name}")[0].kill()
    if what in ("raylet", "machine"):
        machine.start_ray(head=cluster[0])


def test_kills_of_all_kinds_cost_nothing(cluster: Machines) -> None:
    """Far workers, actors, raylets, whole machines and gates, one after another in one run."""
    began = time.monotonic()
    with training(cluster, "-n", "0", "--nodes", "3", *EVER) as run:
        for number in range(KILLS):
            run.run.wait_until(lambda: run.alive() == 2, "both nodes")
            run.wait_for_groups(4)
            what, machine = STRIKES[number % len(STRIKES)], cluster[1 + number // len(STRIKES) % 2]
            print(f"{time.monotonic() - began:.0f} s: {what} on {machine.name}", flush=True)
            strike(what, cluster, machine)
            run.wait_for_groups(4)
        # A machine deletes what it had when its power failed as soon as it joins again.
        run.run.wait_until(lambda: run.alive() == 2, "both nodes")
        assert run.stop() == 0, run.run.output
    judged(cluster, run.folder, attempts={1, 2, 3})


def test_a_link_that_goes_down_and_comes_back_again_and_again(cluster: Machines) -> None:
    """The machine is silent, its groups go to others, and it joins again by itself."""
    with training(cluster, "-n", "0", "--nodes", "3", *EVER) as run:
        for number in range(LINKS):
            machine = cluster[1 + number % 2]
            run.run.wait_until(lambda: run.alive() == 2, "both nodes")
            run.both_work()
            cluster.pull(machine)
            down = time.monotonic()
            run.run.wait_until(lambda: run.alive() == 1, "the silence")
            silent = time.monotonic() - down
            run.wait_for_groups(2)
            time.sleep(max(0.0, DOWN_S - (time.monotonic() - down)))
            cluster.plug(machine)
            up = time.monotonic()
            run.run.wait_until(lambda: run.alive() == 2, "the machine again")
            print(f"{machine.name}: silent after {silent:.1f} s, back {time.monotonic() - up:.1f} s after the link")
        assert run.stop() == 0, run.run.output
        assert f"{machine.name} has not answered for 10 s: its groups are pending again" in run.log()
    judged(cluster, run.folder)


def test_a_machine_that_is_frozen_for_a_minute(cluster: Machines) -> None:
    """What it has to say when it thaws is not heard, and it joins again by itself."""
    frozen = cluster[1]
    with training(cluster, "-n", "0", "--nodes", "3", *EVER) as run:
        run.run.wait_until(lambda: run.alive() == 2, "both nodes")
        run.both_work()
        processes = frozen.freeze()
        began = time.monotonic()
        run.run.wait_until(lambda: run.alive() == 1, "the silence")
        run.wait_for_groups()
        time.sleep(max(0.0, FROZEN_S - (time.monotonic() - began)))
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        run.run.wait_until(lambda: run.alive() == 2, "the machine again")
        run.wait_for_groups()
        assert run.stop() == 0, run.run.output
    judged(cluster, run.folder)


NO_DATA = """
import time
from pathlib import Path

ROWS = Path("/tmp/data.txt").read_text()


def get_trainer():
    time.sleep(600)  # the server loads longer than the test takes
"""


NO_DATA_THERE = Path("/tmp/project/setup.py")


def test_what_a_machine_lacks_is_named(cluster: Machines) -> None:
    """No room for the run directory, no data; and a disk that is full for a while."""
    first, *others = cluster
    for machine in others:
        made = machine.run("sh", "-c", "mkdir small && mount -t tmpfs -o size=4k tmpfs small", deadline_s=60)
        assert made.returncode == 0, made.stderr
    with training(cluster, "-n", "0", "--nodes", "3", "--node-dir", "/tmp/small", "--run-dir", "no-room", *EVER) as run:
        assert run.run.wait() == 2
    assert re.search(r"error: gpu[23]: /tmp/small\S*: the disk is full\. Make room", run.run.output)
    (first.folder / "data.txt").write_text("3+3=\n")
    (first.folder / "project").mkdir()
    (first.folder / "project" / "setup.py").write_text(NO_DATA)
    with training(cluster, "-n", "0", "--nodes", "3", "--run-dir", "no-data", setup=NO_DATA_THERE) as run:
        assert run.run.wait() == 2
    assert re.search(r"on node gpu[23]: .*No such file or directory: '/tmp/data.txt'", run.run.output, re.DOTALL)

    for machine in others:
        machine.run("mount", "-o", "remount,size=8m", "/tmp/small", deadline_s=60)
    with training(cluster, "-n", "0", "--nodes", "3", "--node-dir", "/tmp/small", "--run-dir", RUN, *EVER) as run:
        run.run.wait_until(lambda: run.alive() == 2, "both nodes")
        run.both_work()
        others[0].run("dd", "if=/dev/zero", "of=/tmp/small/file", "bs=4k", deadline_s=60)
        run.run.wait_until(lambda: run.alive() == 1, "the full disk to be noticed")
        run.wait_for_groups()
        others[0].run("rm", "/tmp/small/file", deadline_s=60)
        run.run.wait_until(lambda: run.alive() == 2, "both nodes again")
        run.both_work()
        assert run.stop() == 0, run.run.output
    judged(cluster, run.folder)


def test_the_head_of_ray_is_killed_and_local_workers_go_on(cluster: Machines) -> None:
    with training(cluster, "-n", "1", "--nodes", "3", *EVER) as run:
        run.run.wait_until(lambda: run.alive() == 2, "both nodes")
        run.wait_for_groups()
        cluster[0].having("gcs_server")[0].kill()
        run.run.wait_until(lambda: "Ray is gone: 1 local worker continues." in run.run.output, "the sentence")
        run.run.wait_until(lambda: run.alive() == 0, "the end of the nodes")
        run.wait_for_groups()
        for machine in cluster[1:]:
            until(lambda machine=machine: not machine.ours(), f"the end of {machine.name}'s processes")
        assert run.stop() == 0
    judged(cluster, run.folder)


def test_the_head_of_ray_is_killed_and_nobody_is_left(cluster: Machines) -> None:
    with training(cluster, "-n", "0", "--nodes", "3", *EVER) as run:
        run.run.wait_until(lambda: run.alive() == 2, "both nodes")
        run.wait_for_groups()
        cluster[0].having("gcs_server")[0].kill()
        assert run.run.process.wait(GIVE_UP_S) == 1, run.run.output
        assert "Ray is gone: nobody is left on this machine" in run.run.output
        assert "--resume" in run.run.output
    judged(cluster, run.folder)
