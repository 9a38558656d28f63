"""A server with workers against plain TRL in one process: same model, batch, answers and optimizer steps.

    python benchmarks/async_vs_trl.py [--quick] [--rows even,tail,...] [--json FILE] [--update-docs]

Every side is started as a user would start it. A step's time is counted from the end of the third step to the end of
the last one, so that imports, first kernels and the first rollouts are left out. TRL is run with threads that spin
while they wait, with threads that sleep, and with one thread: the fastest counts. All sides of a setting run one after
the other, in rounds that each begin from another seed, and a speed-up is that of two runs of the same round. Held-out
accuracies are measured after the run on snapshots of the weights, and are exact expectations: no sampling. What is
learnt in a number of steps differs from seed to seed, so times to an accuracy are those of the rounds' mean curves.

The limit beside a speed-up is the total work divided by the cores: TRL with one thread does all of it on one core, so
no schedule of the same work takes less than that time, less what its rewards sleep, divided by the cores. With it, the
CPU seconds that all processes of a side used for a step.

Every setting has five rounds or more, and between two runs the same products of matrices are computed. Where these took
more than a tenth longer at one time than at another, or a figure is better than its limit, something else ran on the
machine, or fuller batches were less work: the row says "not measurable here". Where rewards wait, a step of TRL's takes
the place of those products: it waits as long in each round, and computes for a fifteenth of its time.

Runs lie in memory (/dev/shm) where there is such a folder: on ext4 without a journal, creating a file takes up to 1 ms
once thousands were deleted nearby, which is no cost of ours.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from async_grpo.log import logger

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import capacity
from benchmarks.contests import (
    DEFAULTS,
    LEARNING,
    ONE_THREAD,
    ONE_WIDE_WORKER,
    ONE_WORKER,
    SLOW_REWARD_WORKERS,
    SYNCHRONOUS,
    TRL,
    TRL_UNPADDED,
    TWO_WORKERS,
    TWO_WORKERS_PADDED,
    Contest,
    Progress,
    contests,
    say,
)
from benchmarks.control import PAIRS, control_s
from benchmarks.sides import mean_of, run_side
from benchmarks.table import (
    HEAD,
    Row,
    as_markdown,
    as_text,
    describe_machine,
    interval_95,
    line,
    machine_line,
    row,
    update_docs,
    write_json,
)

ROWS = ("even", "waiting", "overlap", "slow", "tail", "learning", "capacity")
ALONE = ("slow", "tail")  # rows with a table of their own
MEMORY = Path("/dev/shm")
SEEDS = (1, 2, 3, 4, 5)
WORKER_COUNTS = (1, 4, 16, 64)


def speed_rows(all_contests: dict[str, Contest]) -> Iterator[Row]:
    if "even" in all_contests:
        yield from even_rows(all_contests["even"])
    if "overlap" in all_contests:
        yield overlap_row(all_contests["overlap"])
    if "slow" in all_contests:
        yield from slow_rows(all_contests["slow"])
    if "tail" in all_contests:
        yield from tail_rows(all_contests["tail"])


def slow_rows(slow: Contest) -> Iterator[Row]:
    """With as many calls at a time as `thread_safe` admits, and one at a time with all groups that wait in it."""
    name, trl_s = "speed-up, reward waits 0.3 s a call + 10 ms an answer", slow.trl_step_s()
    many = slow.speedups(SLOW_REWARD_WORKERS, trl_s)
    yield row(f"{name}, 16 calls at a time", many, "x", target=">= 2.5", limit=slow.limit(), controls=slow.controls)
    yield row(f"{name}, one call at a time", slow.speedups(DEFAULTS, trl_s), "x", controls=slow.controls)


def even_rows(even: Contest) -> Iterator[Row]:
    for side in even.asynchronous:
        limit, controls = even.limit(), even.controls
        values = even.speedups(side, even.trl_step_s())
        name = f"speed-up, 48-token answers, {side.name}"
        yield row(name, values, "x", target=">= 1.15", limit=limit, controls=controls)
        if limit is not None:
            shares, name = [one / limit for one in values], f"... as a share of its limit, {side.name}"
            yield row(name, shares, "", target=">= 0.9", limit=1.0, controls=controls)
    yield from cpu_rows(even, "48-token answers")


def tail_rows(tail: Contest) -> Iterator[Row]:
    """The limit is of TRL's work, so sides that do not compute its padding have none."""
    name = "speed-up, 10% of the answers 8 times as long"
    for side in tail.asynchronous:
        yield row(
            f"{name}, {side.name}",
            tail.speedups(side, tail.trl_step_s()),
            "x",
            target=">= 1.5",
            limit=tail.limit() if side is TWO_WORKERS_PADDED else None,
            controls=tail.controls,
        )
    unpadded_s = [run.step_s for run in tail.runs[TRL_UNPADDED.name]]
    yield row(
        f"{name}, {TRL_UNPADDED.name}", tail.speedups(TRL_UNPADDED, tail.trl_step_s()), "x", controls=tail.controls
    )
    yield row(
        f"{name}, {TWO_WORKERS.name}, over TRL without padding",
        tail.speedups(TWO_WORKERS, unpadded_s),
        "x",
        controls=tail.controls,
    )
    yield from cpu_rows(tail, "10% of the answers 8 times as long")


def cpu_rows(contest: Contest, what: str) -> Iterator[Row]:
    """CPU seconds a step of all processes, ours over those of TRL with one thread: at 1, only waiting can be won."""
    if ONE_THREAD.name not in contest.runs:
        return
    for side in contest.asynchronous:
        pairs = zip(contest.runs[side.name], contest.runs[ONE_THREAD.name], strict=True)
        ratios = [a.step_cpu_s / b.step_cpu_s for a, b in pairs]
        yield row(f"CPU time of a step, {what}, {side.name}", ratios, "of TRL's", controls=contest.controls)


def overlap_row(overlap: Contest) -> Row:
    """In the synchronous schedule the trainer waits while the worker generates: both times are in its metrics."""
    waits = [run.mean("async/trainer_wait_fraction") for run in overlap.runs[SYNCHRONOUS.name]]
    share = statistics.median(waits)
    return row(
        "speed-up over the synchronous schedule on the same processes",
        overlap.speedups(ONE_WORKER, [run.step_s for run in overlap.runs[SYNCHRONOUS.name]]),
        "x",
        target=">= 1.7",
        limit=1 / max(share, 1 - share),
        controls=overlap.controls,
        note=f"generation takes {share:.0%} of a synchronous step, training {1 - share:.0%}",
    )


def accuracy_rows(all_contests: dict[str, Contest]) -> Iterator[Row]:
    """Time to the same held-out accuracy, on the mean curves of the rounds: when a single run learns is partly luck."""
    for key, side, name in (
        ("slow", SLOW_REWARD_WORKERS, "slow reward: time to held-out accuracy"),
        ("tail", TWO_WORKERS, "long tail, 2 workers: time to held-out accuracy"),
        ("tail", ONE_WIDE_WORKER, "long tail, 1 worker, 20 groups a claim: time to held-out accuracy"),
    ):
        if key not in all_contests:
            continue
        ours, theirs = all_contests[key].runs[side.name], all_contests[key].trl()
        curves = [(mean_of(ours), mean_of(theirs))]
        for out in range(len(ours)):  # for the spread: without one of the rounds
            curves.append((mean_of(ours[:out] + ours[out + 1 :]), mean_of(theirs[:out] + theirs[out + 1 :])))
        first = min(run.accuracy[min(run.accuracy)] for run in curves[0])
        last = min(run.final_accuracy for run in curves[0])
        for share in (0.5, 0.9):
            goal = first + share * (last - first)
            ratios = [a / b for mine, other in curves if (a := mine.seconds_to(goal)) and (b := other.seconds_to(goal))]
            yield row(
                f"{name} {goal:.3f}",
                ratios,
                "of TRL's",
                target="<= 0.6",
                controls=all_contests[key].controls,
                note=f"{share:.0%} of the gain of the side that learnt less; {len(ours)} seeds, and all but one",
            )


def waiting_row(twice: Contest) -> Row:
    runs = twice.runs[ONE_WORKER.name]
    busy = statistics.median(run.mean("async/worker_busy_fraction") for run in runs)
    return row(
        "trainer's share of time waiting, worker has capacity",
        [100 * run.mean("async/trainer_wait_fraction") for run in runs],
        "%",
        target="<= 5",
        controls=twice.controls,
        note=f"48-token answers, {twice.name}, server + 1 worker, which is busy {busy:.0%} of the time",
    )


def machinery_rows(even: Contest) -> Iterator[Row]:
    for side in even.asynchronous:
        yield row(
            f"neither generation, scoring nor TRL's own step, {side.name}",
            [100 * run.mean("async/overhead_fraction") for run in even.runs[side.name]],
            "%",
            target="<= 3",
            controls=even.controls,
            note="async/overhead_fraction: queue, files, weights, bookkeeping, over processes x time",
        )


def capacity_rows(folder: Path, repeats: int, counts: Sequence[int], seconds: float) -> Iterator[Row]:
    """Simulated workers of one process, by turns, and workers in processes of their own, on the same cores.

    The limit beside the latter is what two sockets do with as many processes.
    """
    for own_processes in (False, True):
        controls = [control_s()]
        measured: dict[int, list[capacity.Capacity]] = {count: [] for count in counts}
        sockets: dict[int, list[capacity.Capacity]] = {count: [] for count in counts}
        for repeat in range(repeats):
            for count in counts:
                run = folder / f"capacity-{count}-{own_processes}-{repeat}"
                measured[count].append(capacity.measure(count, run, seconds, own_processes=own_processes))
                shutil.rmtree(run)  # the next one in memory that was used before: new memory may be slower
                if own_processes:
                    sockets[count].append(capacity.measure_sockets(count, seconds))
                controls.append(control_s())
            say(f"capacity: {', '.join(f'{count}: {measured[count][-1].groups_per_s:.0f}/s' for count in counts)}")
        kind = "worker processes" if own_processes else "simulated workers"
        for name, of, unit, target in (
            ("capacity", attrgetter("groups_per_s"), "groups/s", ">= 0.9"),
            ("server's CPU time a group", attrgetter("server_cpu_ms"), "ms", "<= 1.1"),
        ):
            for count in counts:
                limit = statistics.median(map(of, sockets[count])) if own_processes else None
                values = list(map(of, measured[count]))
                yield row(f"{name}, {kind}: {count}", values, unit, limit=limit, controls=controls)
            limit = statistics.median(_growth(sockets, of)) if own_processes else None
            about = f"{name}, {kind}: {counts[-1]} over {counts[0]}"
            yield row(about, _growth(measured, of), "x", target=target, limit=limit, controls=controls)


def _growth(measured: dict[int, list[capacity.Capacity]], of: Callable[[capacity.Capacity], float]) -> list[float]:
    """From the fewest to the most workers, in each repeat."""
    return [of(many) / of(few) for few, many in zip(measured[min(measured)], measured[max(measured)], strict=True)]


def learning_rows(folder: Path, progress: Progress) -> Iterator[Row]:
    """Final held-out accuracy, ours less TRL's, by seed."""
    finals: list[tuple[float, float]] = []
    for seed in SEEDS:
        accuracies = []
        for side in (DEFAULTS, TRL):
            run = run_side(side, replace(LEARNING, seed=seed), folder / f"seed-{seed}-{side.workers}-workers")
            accuracies.append(run.final_accuracy)
            progress.run_done(f"seed {seed}: {side.name}: accuracy {run.final_accuracy:.4f}")
        ours, theirs = accuracies
        finals.append((ours, theirs))
    differences = [ours - theirs for ours, theirs in finals]
    mean, half = interval_95(differences)
    yield row(
        f"final held-out accuracy less TRL's, {len(finals)} seeds",
        differences,
        "",
        target=">= 0",
        ok=mean + half >= 0,
        note=(
            f"mean {mean:+.4f}, 95% interval {mean - half:+.4f} .. {mean + half:+.4f} (ok: includes 0 or better); "
            f"TRL's accuracy is {statistics.mean(theirs for _, theirs in finals):.3f}"
        ),
    )


def measure(folder: Path, rows: Sequence[str], *, quick: bool) -> Iterator[Row]:
    chosen = {key: contest for key, contest in contests(quick=quick).items() if key in rows}
    learning = "learning" in rows and not quick
    runs = sum(contest.rounds * len(contest.todo()) for contest in chosen.values()) + 2 * len(SEEDS) * learning
    progress = Progress(runs)
    progress.begin()
    for repeat in range(max((contest.rounds for contest in chosen.values()), default=0)):
        for contest in chosen.values():
            if repeat < contest.rounds:
                contest.round(folder, repeat, progress)
    yield from speed_rows(chosen)
    if not quick:
        yield from accuracy_rows(chosen)
    if learning:
        yield from learning_rows(folder, progress)
    if "waiting" in chosen:
        yield waiting_row(chosen["waiting"])
    if "even" in chosen:
        yield from machinery_rows(chosen["even"])
    if "capacity" in rows:
        counts, rounds, seconds = ((1, 16), PAIRS, 0.7) if quick else (WORKER_COUNTS, PAIRS, 2.0)
        yield from capacity_rows(folder, rounds, counts, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first and the third setting, in short: five minutes")
    parser.add_argument("--rows", default=",".join(ROWS), metavar="NAMES", help=f"only these rows, of {','.join(ROWS)}")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    parser.add_argument("--update-docs", action="store_true", help="put the table into the documentation")
    args = parser.parse_args()
    chosen = args.rows.split(",")
    if unknown := set(chosen) - set(ROWS):
        parser.error(f"--rows: there is no {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if args.update_docs and set(chosen) not in ({*ROWS}, *({name} for name in ALONE)):
        parser.error(f"--update-docs needs all rows, or {' or '.join(ALONE)} alone: a table is replaced as a whole")
    logger.remove()
    logger.add(sys.stderr, level="INFO")  # as in a run: lines for debugging are not written
    started = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="async-vs-trl-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        for one in measure(Path(folder), chosen, quick=args.quick):
            if not rows:
                print(line(HEAD))
            print(as_text([one]), flush=True)
            rows.append(one)
    took_s = time.monotonic() - started
    machine = machine_line(describe_machine())
    print(f"{machine}; {took_s:.0f} s in all")
    if args.json:
        write_json(args.json, rows, seconds=round(took_s))
    if args.update_docs:
        notes = "\n".join(f"- {one.name}: {one.note}" for one in rows if one.note)
        table = "async_vs_trl" if set(chosen) == set(ROWS) else f"async_vs_trl_{chosen[0]}"
        update_docs(table, f"{machine}; the run took {took_s:.0f} s.\n\n{as_markdown(rows)}\n\n{notes}")


if __name__ == "__main__":
    main()
