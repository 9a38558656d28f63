"""The queue under faults. Prints a summary of each part as JSON; fails with an error.

python tests/chaos/queue_faults.py --root DIR [--part kill] [--seed N]

Parts: `kill`, `error` and `power` strike at every file operation of a fixed life; `any` has hypothesis play everybody;
`corrupt` reads damaged files; `disk` fills the file system of DIR/q.
"""

from __future__ import annotations

import ast
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from queue_damage import read_damaged_files
from queue_disk import FAULTS, NEED_ROOM, OPERATIONS, Fault, Site
from queue_harness import arguments
from queue_machine import DURABLE, PLAIN, QueueMachine

import async_grpo.queue
from async_grpo.queue import wakeups
from async_grpo.queue import worker as queue_worker

POISON = 3
PACKAGE = Path(async_grpo.queue.__file__).parent
FOR_PEOPLE = "listing"  # it opens the directory itself


def live(machine: QueueMachine) -> None:
    """A life in which server and workers do everything that they can do."""
    machine.start()
    machine.submit()
    machine.claim(PLAIN, 2, told=True)
    machine.complete(PLAIN)
    machine.hand_back(PLAIN)
    machine.tidy_up("tmp")
    machine.turn()
    machine.checkpoint()
    machine.claim(PLAIN, 2)
    machine.kill_worker(PLAIN)
    machine.turn()
    machine.kill_server()
    machine.turn()
    machine.end_worker(DURABLE)
    machine.trim(1)


def play(*faults: tuple[int, Fault]) -> list[str]:
    """The life with these faults in it, to its end; returns the operations until then."""
    machine = QueueMachine(poison=POISON)
    machine.disk.armed = list(faults)
    try:
        live(machine)
    except BaseException:
        machine.close()
        raise
    operations = [*machine.disk.operations]
    machine.teardown()
    return operations


def cases_of(kind: str, operations: list[str], recovery: int) -> tuple[list[Any], list[Any]]:
    """Every fault of a kind at every operation: those that each slice has, and the others."""
    first = [
        (at, fault)
        for at, operation in enumerate(operations)
        for fault in FAULTS[kind]
        if (fault.moment != "in" or operation == "create") and (kind != "power" or operation in (*NEED_ROOM, "unlink"))
    ]
    alone: list[Any] = [(one,) for one in first]
    if kind == "power":
        return [], alone
    if kind == "error":  # it strikes twice, or its victim is killed
        return [], [*alone, *((one, (0, second)) for one in first for second in (one[1], *FAULTS["kill"]))]
    full = Fault("ENOSPC", "in")
    cleaning = [((at, full), (0, fault)) for at, fault in first if operations[at] == "create"]
    return alone + cleaning, [(one, (later, one[1])) for one in first for later in range(recovery)]


def strike(kind: str, options: Any) -> dict[str, Any]:
    """The life again and again, each time with another fault in it."""
    operations = play()
    always, others = cases_of(kind, operations, options.recovery)
    cases = always + others[options.seed % options.every :: options.every]
    for case in cases:
        try:
            play(*case)
        except Exception as error:
            raise AssertionError(f"{operations[case[0][0]]}: {case}") from error
    if kind == "kill":
        missed = {(site, moment) for site in sites() for moment in ("before", "after")} - QueueMachine.killed
        assert not missed, f"nobody was killed at {missed}"
    return {"operations": len(operations), "cases": len(cases)}


def sites() -> Iterator[Site]:
    """Where the queue's modules do file operations, by their sources."""
    for path in sorted(PACKAGE.glob("*.py")):
        functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
        for function in functions if path.stem != FOR_PEOPLE else ():
            asked = (node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr in OPERATIONS)
            yield from (
                Site(path.stem, function.name, node.attr) for node in asked if ast.unparse(node.value).endswith("files")
            )


def any_order(options: Any) -> dict[str, Any]:
    """Whatever hypothesis draws. A failure is printed with the blob that repeats it."""
    machine_settings = settings(
        max_examples=options.examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        database=None,
        phases=(Phase.generate,),
    )
    run_state_machine_as_test(seed(options.seed)(QueueMachine), settings=machine_settings)
    return {"examples": options.examples}


def fill_disk(options: Any) -> dict[str, Any]:
    """The archive fills the file system of `--root`/q; only a checkpoint allows the trainer to trim it."""
    machine = QueueMachine(jobs=200, window=32, root=options.root / "q")
    machine.start()
    machine.teardown()
    assert machine.times_full, "the disk was never full: give it less room"
    return {"jobs": machine.jobs, "disk_full": machine.times_full}


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "corrupt": lambda options: read_damaged_files(options.root, options.count, options.seed),
    **{kind: partial(strike, kind) for kind in FAULTS},
    "any": any_order,
    "disk": fill_disk,
}


def main() -> None:
    options = arguments(part="corrupt,any,kill,error,power", every=1, recovery=15, examples=3000, count=40_000)
    QueueMachine.folder = options.root
    wakeups._inotify = lambda masks: -1  # nobody waits for it here, and the kernel takes 10 ms to close one
    queue_worker._PIPE_TRUST_S = 3600.0  # whether the directory is looked at is a matter of `told`, not of time
    for part in options.part.split(","):
        started = time.monotonic()
        print(json.dumps({**PARTS[part](options), "seconds": round(time.monotonic() - started, 1)}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # noqa: BLE001 - whatever was found
        traceback.print_exception(error)
        sys.exit(1)
