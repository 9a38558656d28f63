"""A queue in memory and the few lines around it, for the tests of the trainer side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from async_grpo.archive.rollout_state import RolloutState
from async_grpo.errors import DiskFullError
from async_grpo.records import Job, RolloutGroup
from async_grpo.training.job_issuer import JobIssuer
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.rollout_source import RolloutSource
from async_grpo.training.schedule import Schedule
from kit.groups import RUN, make_group


class Counts(NamedTuple):
    pending: int
    processing: int
    complete: int


class FakePublisher:
    """`version` is what the workers can see."""

    def __init__(self) -> None:
        self.version: int | None = 0
        self.held_at: int | None = None
        self.retries = 0

    def retry(self) -> None:
        self.retries += 1


class FakeHistory:
    """Remembers the groups that are not used, and why."""

    def __init__(self) -> None:
        self.left_out: list[tuple[int, str]] = []

    def dropped(self, seq: int, reason: str) -> None:
        self.left_out.append((seq, reason))


class FakeArchive:
    """Counts how often space was asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def make_space(self) -> None:
        self.asked += 1


class GivenUp(NamedTuple):
    job: Job
    attempt: int
    reason: str


class FakeServerQueue:
    """What `RolloutSource` uses of `ServerQueue`. The test plays the workers; `on_wait` is the passing of time."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}  # submitted, not finished
        self.claimed: set[int] = set()
        self.given_up: dict[int, GivenUp] = {}
        self.submitted: list[int] = []
        self.waits = 0
        self.on_wait: Callable[[], None] = _nobody_works
        self.alive = 1
        self.disk_full = False
        self.workers_lack_room = False
        self._finished: dict[int, RolloutGroup] = {}

    # what the trainer side calls
    def submit(self, job: Job) -> None:
        assert job.seq not in self.jobs, f"job {job.seq} submitted twice"
        if self.disk_full:
            raise DiskFullError("No room for the queue.")
        self.jobs[job.seq] = job
        self.submitted.append(job.seq)

    def short_of_room(self) -> bool:
        return self.workers_lack_room

    def finished(self) -> list[int]:
        return sorted(self._finished)

    def take(self, entry: int) -> RolloutGroup | None:
        if self.disk_full:
            raise DiskFullError("No room for done/.")
        return self._finished.pop(entry)

    @property
    def open_jobs(self) -> int:
        return len(self.jobs)

    def unclaimed(self) -> list[int]:
        return sorted(self.jobs.keys() - self.claimed)

    def counts(self) -> Counts:
        return Counts(len(self.unclaimed()), len(self.claimed), len(self._finished))

    def workers(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=f"dev{number}") for number in range(1, self.alive + 1)]

    def claimants(self) -> list[str]:
        return ["dev1"] if self.claimed else []

    def wait(self, timeout_s: float) -> bool:
        self.waits += 1
        self.on_wait()
        return True

    # what workers do
    def claim(self, *seqs: int) -> list[Job]:
        self.claimed |= {*seqs}
        return [self.jobs[seq] for seq in seqs]

    def finish(self, *seqs: int, version: int) -> None:
        for seq in seqs:
            self._finished[seq] = make_group(self._close(seq), version)

    def fail_for_good(self, *seqs: int, reason: str = "Traceback:\nValueError: bad reward") -> None:
        for seq in seqs:
            self.given_up[seq] = GivenUp(self._close(seq), 2, reason)

    def _close(self, seq: int) -> Job:
        self.claimed.discard(seq)
        return self.jobs.pop(seq)


def _nobody_works() -> None:
    raise AssertionError("the source waits for groups, and this test has no worker that could finish one")


def schedule(B: int = 2, K: int = 4, per_round: int = 1, per_version: int = 1, G: int = 16) -> Schedule:
    return Schedule(
        groups_per_round=B,
        num_generations=G,
        micro_steps_per_round=per_round,
        micro_steps_per_version=per_version,
        max_staleness=K,
    )


class Bench:
    """A `RolloutSource` on a fake queue, with everything around it at hand."""

    def __init__(
        self,
        plan: Schedule,
        resume_from: RolloutState | None = None,
        max_wait_s: float = 1000.0,
        seed: int = 0,
        tasks: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.queue = FakeServerQueue()
        self.publisher = FakePublisher()
        self.history = FakeHistory()
        self.archive = FakeArchive()
        self.stopping = False
        self.logged: dict[str, list[float]] = {}
        self.metrics = RolloutMetrics(lambda name, value: self.logged.setdefault(name, []).append(value))
        self.source = RolloutSource(
            queue=self.queue,  # type: ignore[arg-type]  # fakes have only what is used
            issuer=JobIssuer(
                self.queue,  # type: ignore[arg-type]
                _rows(resume_from.consumed_below if resume_from else 0, tasks),
                run_id=RUN,
                seed=seed,
                num_generations=2,
                archive=self.archive,  # type: ignore[arg-type]
                resume_from=resume_from,
            ),
            schedule=plan,
            publisher=self.publisher,  # type: ignore[arg-type]
            history=self.history,  # type: ignore[arg-type]
            metrics=self.metrics,
            should_stop=lambda: self.stopping,
            resume_from=resume_from,
            max_wait_s=max_wait_s,
            way_to_workers="start one with `async-grpo worker`",
            **options,
        )

    def use(self, *seqs: int, version: int) -> list[RolloutGroup]:
        """Let workers finish these groups, and the trainer make a step of what it takes then."""
        self.queue.finish(*seqs, version=version)
        taken = self.source.take(version)
        self.step_done(version + 1)
        return taken

    def step_done(self, version: int) -> None:
        """What happens after every optimizer step."""
        self.source.trained()
        self.publisher.version = version
        self.source.advance(version)


def begun(plan: Schedule, **options: Any) -> Bench:
    """A bench whose first jobs are issued."""
    bench = Bench(plan, **options)
    bench.source.advance(0)
    return bench


def _rows(start: int, tasks: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Numbered rows, of the tasks in turn."""
    number = start
    while True:
        yield {"n": number, "task": tasks[number % len(tasks)]} if tasks else {"n": number}
        number += 1


def seqs(batch: list[RolloutGroup]) -> list[int]:
    return [group.job.seq for group in batch]
