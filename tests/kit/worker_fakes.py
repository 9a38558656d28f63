"""A worker over fakes: its queue, its weights, TRL, and an engine that writes one token a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from async_grpo.engines import Chunk, PreparedGroup, SampledGroup
from async_grpo.engines.continuous import ContinuousEngine
from async_grpo.queue import Claim
from async_grpo.queue.names import PROCESSING, JobName
from async_grpo.records import Job, RolloutGroup
from async_grpo.rollout.trl_group import GeneratedGroup, Scores
from async_grpo.rollout.worker import Worker, WorkerContext
from async_grpo.settings import WorkerSettings
from async_grpo.tokens import NO_VERSION, Tokens
from async_grpo_ipc import ExporterDiedError
from kit.engines import job as make_job

TOKENS = 6  # of a completion; a prompt [n] may ask for more
LONG = 10**5  # threads may be slow to ask for the tokens of others, which are to be in flight with these
ENDLESS = 10**9
BATCH = SimpleNamespace(per_device_train_batch_size=2, steps_per_generation=4)  # four groups of two completions
REWRITTEN = [7]  # prompt of a group whose completions the user's code changes


class FakeEngine:
    """Writes the version of its weights as every token."""

    def __init__(self, *, versions_at_once: int = 1, delta: bool = False) -> None:
        self.versions_at_once = versions_at_once
        self.max_num_seqs = 8
        self.version = -1
        self.loads: list[tuple[int, tuple[int, ...]]] = []  # version, versions in use
        self.open: dict[str, list[Any]] = {}  # request -> [version or None, prompt, tokens so far]
        self.delta = delta
        self.seeds: list[int | None] = []
        self.most = 0
        self.before_step: Callable[[int], None] = lambda step: None
        self.steps = 0
        self.forgotten = False

    @property
    def busy(self) -> bool:
        return bool(self.open)

    def submit(
        self,
        request_id: str,
        prompt_ids: list[int],
        *,
        seed: int | None,
        version: int,
        own: dict[str, Any],
        images: list[Any] | None,
    ) -> None:
        if prompt_ids == [-1]:
            raise ValueError("the prompt is too long")
        self.seeds.append(seed)
        self.open[request_id] = [version, prompt_ids[0], 0]
        self.most = max(self.most, len(self.open))

    def step(self) -> list[Chunk]:
        self.steps += 1
        self.before_step(self.steps)
        chunks = []
        for request, state in list(self.open.items()):
            state[2] += 1
            finished = state[2] >= max(TOKENS, state[1])
            if finished:
                del self.open[request]
            count = 1 if self.delta else state[2]
            if self.delta or finished:
                token = self.version if self.delta or self.versions_at_once == 1 else state[0]
                chunks.append(Chunk(request, Tokens([token] * count, [-0.5] * count), finished))
        return chunks

    def abort(self, request_ids: list[str]) -> None:
        for request in request_ids:
            self.open.pop(request, None)

    def forget_weights(self) -> None:
        self.forgotten = True

    def load(self, tensors: Any, version: int, in_use: Any = ()) -> None:
        assert self.delta or self.versions_at_once > 1 or not self.open, "weights changed under running requests"
        self.version = version
        self.loads.append((version, tuple(sorted(in_use))))


class FakeWeights:
    generation = "one"

    def __init__(self) -> None:
        self.version: int | None = 0
        self.held: bool | None = None  # None: the engine has a copy
        self.lost = False
        self.dies_with: int | None = None  # the version that is being read when the exporter dies; the next one has 2

    @property
    def newest(self) -> tuple[str, int] | None:
        return None if self.version is None else (self.generation, self.version)

    def intact(self, *, wait: bool) -> bool:
        assert self.held is not False, "asked before the weights are released"
        return not self.lost

    def release(self) -> None:
        self.held = self.held and False

    @contextmanager
    def lease(self) -> Iterator[Any]:
        yield SimpleNamespace(items=dict, version=self.version, generation=self.generation)
        if self.version == self.dies_with:
            self.version = 2
            raise ExporterDiedError("gone")


class FakeWorkerQueue:
    name, device = "dev1", 1

    def __init__(self, jobs: list[Job]) -> None:
        self.waiting = list(jobs)
        self.completed: list[RolloutGroup] = []
        self.failed: list[tuple[int, str]] = []
        self.handed_back: list[int] = []
        self.workers = 1
        self.on_idle: Callable[[], None] = lambda: None

    def claim(self, limit: int, skip: Any = ()) -> list[Claim]:
        taken = [job for job in self.waiting if job.seq not in skip][:limit]
        self.waiting = [job for job in self.waiting if not any(job is other for other in taken)]
        return [Claim(job, 0, JobName(job.seq, 0, PROCESSING, "dev1")) for job in taken]

    def complete(self, claim: Claim, group: RolloutGroup) -> None:
        self.completed.append(group)

    def fail(self, claim: Claim, error: str) -> None:
        self.failed.append((claim.job.seq, error))

    def hand_back(self, claim: Claim) -> None:
        self.handed_back.append(claim.job.seq)

    def pending(self) -> int:
        return len(self.waiting)

    def served(self) -> bool:
        return True

    def alive_workers(self) -> int:
        return self.workers

    def wait(self, timeout_s: float, skip: Any = ()) -> bool:
        self.on_idle()
        return False


class FakeTRL:
    """The prompts are in the row; `samples_whole` decides whether TRL asks for their tokens itself."""

    def __init__(self, *, samples_whole: bool) -> None:
        self.samples_whole, self.goes_by_turns, self.tools = samples_whole, False, {}
        self.trainer = SimpleNamespace(environment_factories=None, rollout_func=None, reward_funcs=[], args=BATCH)
        self.before_finish: Callable[[SampledGroup], None] = lambda sampled: None

    def fork(self) -> FakeTRL:
        return copy.copy(self)

    def prepare(self, job: Job, version: int) -> PreparedGroup:
        return PreparedGroup(job=job, version=version, prompt_ids=prompt_ids_of(job))

    def finish(self, sampled: SampledGroup) -> GeneratedGroup:
        self.before_finish(sampled)
        ids = [tokens.ids for tokens in sampled.tokens]
        return made(sampled.prepared.job, sampled.prepared.version, ids, [tokens.versions for tokens in sampled.tokens])

    def sampling_of(self, job: Job) -> dict[str, Any]:
        return job.sampling

    def generate(self, jobs: Sequence[Job], version: int, sample: Any) -> list[GeneratedGroup]:
        groups = []
        for job in jobs:
            ids, _ = sample(prompt_ids_of(job))
            if job.row["ids"] == REWRITTEN:
                ids[0][0] = 99
            groups.append(made(job, version, ids, None))
        return groups

    def score(self, groups: Sequence[GeneratedGroup]) -> list[Scores]:
        return [Scores(names=("reward",), rewards=torch.zeros(2, 1), metrics={}, extra_columns={}) for _ in groups]


def prompt_ids_of(job: Job) -> list[list[int]]:
    return [list(job.row["ids"]) for _ in range(job.num_generations)]


def made(job: Job, version: int, ids: list[list[int]], versions: list[list[int]] | None) -> GeneratedGroup:
    size = job.num_generations
    return GeneratedGroup(
        job=job,
        begun_by=version,
        rows=[job.row] * size,
        prompts=["p"] * size,
        completions=["c"] * size,
        prompt_ids=prompt_ids_of(job),
        tokens=[
            Tokens(row, [-0.5] * len(row), versions=versions[index] if versions else [NO_VERSION] * len(row))
            for index, row in enumerate(ids)
        ],
        has_masks=False,
        environments=None,
        metrics={},
    )


def job(seq: int, tokens: int = TOKENS, min_version: int = 0) -> Job:
    return make_job(seq, row={"ids": [tokens]}, min_version=min_version)


class Setting:
    """A worker over fakes, which ends when the queue is idle and everything came back, unless the test says more."""

    samples_whole = True

    def __init__(self, tmp_path: Path, jobs: list[Job], engine: FakeEngine, **options: Any) -> None:
        (tmp_path / "alive").mkdir()
        self.engine, self.queue = engine, FakeWorkerQueue(jobs)
        self.weights = options.pop("weights", None) or FakeWeights()
        self.goes_on = True
        self.queue.on_idle = self.end
        state = SimpleNamespace(state="running")
        settings = WorkerSettings(groups_per_claim=options.pop("groups_per_claim", None))
        deterministic = options.pop("deterministic", False)
        self.trl = FakeTRL(samples_whole=self.samples_whole)
        context = WorkerContext(
            trl=self.trl,  # type: ignore[arg-type]
            queue=self.queue,  # type: ignore[arg-type]
            weights=self.weights,  # type: ignore[arg-type]
            run=SimpleNamespace(root=tmp_path, read_state=lambda: state if self.goes_on else None),  # type: ignore[arg-type]
            should_stop=options.pop("should_stop", lambda: False),
            settings=settings,
            deterministic=deterministic,
            check_run=options.pop("check_run", lambda state: None),
        )
        update = options.pop("in_flight_update", False)
        continuous: Any = ContinuousEngine(engine, group_size=2, in_flight_update=update, deterministic=deterministic)
        self.worker = Worker(context, options.pop("batch_engine", continuous))

    def end(self) -> None:
        self.goes_on = self.goes_on and bool(self.queue.waiting)

    def end_long_ones(self, when_done: int, in_flight: int = ENDLESS) -> None:
        """Let every completion end once this many groups have come back.

        Args:
            in_flight: those that are not endless end once so many have been in flight together.
        """
        for state in self.engine.open.values():
            if len(self.queue.completed) == when_done or (state[1] < ENDLESS and self.engine.most >= in_flight):
                state[1] = 0

    def run(self) -> dict[int, RolloutGroup]:
        self.worker.run()
        return {group.job.seq: group for group in self.queue.completed}
