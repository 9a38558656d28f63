"""A publisher and readers of weights that are killed by chance, and what they have read."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from weights_actors import Nursery, processes_mapping, read_log

from kit.waiting import until

ACTORS = ("writer", "pull", "alias", "alias2")


def kill_loop(nursery: Nursery, handle: Path, kills: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """A writer without pause and three readers; one of them, by chance, is killed and replaced, `kills`
    times.
    """
    chance = random.Random(seed)
    logs = {name: handle.with_name(f"{name}.log") for name in ACTORS}

    def start(name: str) -> int:
        common = {"path": str(handle), "log": str(logs[name])}
        if name == "writer":
            return nursery.spawn("write_forever", **common)
        return nursery.spawn("read_forever", way=name.rstrip("2"), seed=chance.randrange(2**30), **common)

    running = {name: start(name) for name in ACTORS}
    killed: Counter[str] = Counter()
    for _ in range(kills):
        time.sleep(chance.random() * 0.06)
        name = chance.choice(ACTORS)
        status = nursery.kill(running[name])
        assert status == signal.SIGKILL, f"{name} had ended by itself: {read_log(logs[name])[-1]}"
        killed[name] += 1
        running[name] = start(name)
    for name in ACTORS:
        events_before = len(read_log(logs[name]))
        until(lambda name=name, n=events_before: len(read_log(logs[name])) > n + 3, f"{name} to go on")
    for name in chance.sample(ACTORS, len(ACTORS)):
        assert nursery.kill(running[name]) == signal.SIGKILL
    print(f"seed {seed}: {dict(killed)} killed")
    return {name: read_log(logs[name]) for name in ACTORS}


def check_reads(events: dict[str, list[dict[str, Any]]]) -> None:
    reads = [event for name in ACTORS for event in events[name] if event["kind"] == "read"]
    assert [event for name in ACTORS for event in events[name] if event["kind"] == "failed"] == []
    assert [event for event in reads if event["torn"]] == []
    last: dict[tuple[int, str], int] = {}
    for event in reads:
        reader = (event["pid"], event["generation"])
        assert event["version"] >= last.get(reader, 0), f"{event} after version {last[reader]}"
        last[reader] = event["version"]
    published = sum(event["kind"] == "published" for event in events["writer"])
    waits = sorted(event["waited"] for event in reads)
    print(f"{len(reads)} reads of {published} versions, longest wait {waits[-1]:.3f} s, 0 torn, 0 backwards")
    assert waits[-1] < 10, "a dead holder's lock is free at once; this bound is for a machine with other work"
    generations = {event["generation"] for event in events["writer"] if event["kind"] == "exporter"}
    for generation in generations:
        assert processes_mapping(generation) == [], f"memory of generation {generation} is left behind"
