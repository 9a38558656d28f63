"""The server of `async-grpo generate`: publishes given weights, has the workers sample by a plan, trains nothing.

A plan is a generator (`evals.asking.Plan`). It yields waves of requests and is sent their groups, so that a later wave
may continue what an earlier one sampled. A setup file brings one as `trainer.generation_plan`, a function from the
number of problems; without it, each problem gets the same number of completions. A resume runs the plan again: groups
that an earlier process left are the answers to the same requests.
"""

from __future__ import annotations

import filecmp
import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.archive.disk_space import retry_while_full
from async_grpo.archive.groups import FinishedGroups
from async_grpo.errors import AsyncGRPOError, UsageError
from async_grpo.evals.asking import Asking, Plan, SampleRequest
from async_grpo.formatting import counted
from async_grpo.log import logger
from async_grpo.records import Job, RolloutGroup, seed_from
from async_grpo.roles.answering import AnswerServer, rule_of
from async_grpo.rundir.files import space_for
from async_grpo.training.groups_for_trl import rollout_output
from async_grpo.training.job_issuer import task_of

if TYPE_CHECKING:
    from trl import GRPOTrainer

OPEN_AT_A_TIME = 1024  # requests: nothing else is in the queue


def generate(server: AnswerServer) -> bool:
    """Sample by the trainer's plan, wave by wave, and write the rows; False if the process was asked to stop."""
    from async_grpo.training.prompts import training_rows

    assert server.plan.rows is not None
    problems = training_rows(server.trainer)
    rule = rule_of(server)
    server.weights.publish(0, server.plan.models[0])
    finished = [found.group for found in FinishedGroups(server.run.root).evaluated()]
    plan = _plan_of(server.trainer, len(problems), server.plan.rows.samples)
    sampled: list[AnsweredRequest] = []
    number, requests = 0, next(plan, None)
    while requests is not None:
        wave = _Wave(server, problems, number, requests, finished)
        logger.info("wave {}: {} of {}", number, counted(len(requests), "request"), server.plan.models[0])
        if not wave.asking.wait(server.should_stop):
            return False
        sampled += wave.sampled()
        number += 1
        try:
            requests = plan.send(wave.groups)
        except StopIteration:
            requests = None
    if not sampled:
        raise AsyncGRPOError("Nothing was sampled, so there are no rows. The log has the reasons.")
    out = server.plan.rows.out
    retry_while_full(lambda: write_rows(out, sampled, rule), should_stop=server.should_stop)
    logger.info("{} of {} are in {}", counted(len(sampled), "group"), counted(len(problems), "problem"), out)
    return True


def _plan_of(trainer: GRPOTrainer, problems: int, samples: int | None) -> Plan:
    own = getattr(trainer, "generation_plan", None)
    if own is None:
        return _samples(problems, samples or trainer.num_generations)
    if samples is not None:
        raise UsageError("The setup file has a generation_plan, which says what is sampled. Leave --samples out.")
    return own(problems)


def _samples(problems: int, samples: int) -> Plan:
    """The plan of a setup file that brings none: one wave."""
    yield [SampleRequest(problem=problem, samples=samples) for problem in range(problems)]


class _Wave:
    """The requests of one wave, on their way.

    Attributes:
        groups: by request; None: it has failed, or is on its way.
    """

    def __init__(
        self,
        server: AnswerServer,
        problems: Sequence[dict[str, Any]],
        number: int,
        requests: Sequence[SampleRequest],
        finished: Sequence[RolloutGroup],
    ) -> None:
        self._problems, self._number, self._requests = problems, number, requests
        self._run_id, self._seed = server.state.run_id, server.trainer.args.seed
        self._longest: int | None = server.trainer.max_completion_length
        self._samplings = [self._sampling(request) for request in requests]
        before: Counter[int] = Counter()  # requests for the same problem
        self._indices: list[int] = []
        for request in requests:
            self._indices.append(before[request.problem])
            before[request.problem] += 1
        self.groups: list[RolloutGroup | None] = [None] * len(requests)
        self.asking = Asking(
            server.queue,
            len(requests),
            self._job,
            self.groups.__setitem__,
            purpose="generate",
            version=0,
            most_open=OPEN_AT_A_TIME,
            finished=finished,
        )

    def sampled(self) -> list[AnsweredRequest]:
        """The groups, each with where it belongs. The log has what failed."""
        for index, reason in list(self.asking.failed.items())[:3]:
            logger.warning("problem {} could not be sampled: {}", self._requests[index].problem, reason)
        if failed := len(self.asking.failed):
            logger.warning("{} could not be sampled: the rows are those of the others", counted(failed, "request"))
        return [
            AnsweredRequest(request.problem, self._number, index, group)
            for request, index, group in zip(self._requests, self._indices, self.groups, strict=True)
            if group is not None
        ]

    def _job(self, index: int, seq: int) -> Job:
        request = self._requests[index]
        row = self._problems[request.problem]
        return Job(
            run_id=self._run_id,
            seq=seq,
            row=row,
            num_generations=request.samples,
            # A problem that fails changes nothing of the others.
            seed=seed_from(f"generation:{self._seed}:{self._number}:{request.problem}:{self._indices[index]}"),
            born_version=0,
            min_version=0,
            purpose="generate",
            sampling=self._samplings[index],
            task=task_of(row),
            prefix_ids=request.prefix_ids,
        )

    def _sampling(self, request: SampleRequest) -> dict[str, Any]:
        """Prefix and continuation are together no longer than the setup file lets completions be."""
        length = len(request.prefix_ids)
        if not length or "max_tokens" in request.sampling or self._longest is None:
            return request.sampling
        if length >= self._longest:
            raise UsageError(
                f"Wave {self._number} of the generation_plan continues {length} tokens of problem {request.problem}, "
                f"and completions have at most {self._longest} (max_completion_length): nothing is left to sample. "
                "Have the plan cut earlier, or set max_tokens of the request's sampling, then continue with --resume."
            )
        return {**request.sampling, "max_tokens": self._longest - length}


class AnsweredRequest(NamedTuple):
    problem: int  # index of its row in the dataset
    wave: int
    request: int  # of those of its problem in its wave
    group: RolloutGroup


def write_rows(folder: Path, sampled: Sequence[AnsweredRequest], rule: AdvantageRule) -> None:
    """Write one row a completion, in the order of the dataset; the folder appears whole.

    Raises:
        DiskFullError: there is no space.
        UsageError: the folder exists and holds other rows.
    """
    from datasets import Dataset, Features, List, Value
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    features = Features(
        {
            "problem": Value("int32"),
            "wave": Value("int32"),
            "request": Value("int32"),
            "sample": Value("int32"),
            "prompt_ids": List(Value("int32")),
            "completion_ids": List(Value("int32")),
            "completion_mask": List(Value("int8")),
            "reward": Value("float32"),
            "rewards": List(Value("float32")),
        }
    )
    rows = [row for one in sorted(sampled, key=lambda one: one[:3]) for row in _rows(one, rule)]
    part = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        with space_for(folder):
            found = Dataset.from_list(rows, features=features)
            Dataset(found.data, info=found.info, fingerprint=_fingerprint(found.data.table)).save_to_disk(part)
            if not folder.exists():
                part.replace(folder)
            elif not _holds_the_rows_of(part, folder):  # else this run wrote them, and was killed then
                raise UsageError(
                    f"{folder} has appeared since this generation began, and holds other rows. Move it away, then "
                    "continue with --resume: what is sampled is kept."
                )
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fingerprint(table: Any) -> str:
    """The hash of what the table holds, where datasets would take a random one: the same rows are the same files."""
    digest = hashlib.sha256()
    for column in table.columns:
        for chunk in column.chunks:
            for buffer in filter(None, chunk.buffers()):
                digest.update(buffer)
    return digest.hexdigest()


def _holds_the_rows_of(part: Path, folder: Path) -> bool:
    names = [path.name for path in part.glob("*.arrow")]
    same, _, _ = filecmp.cmpfiles(part, folder, names, shallow=False)
    return same == names


def _rows(one: AnsweredRequest, rule: AdvantageRule) -> Iterator[dict[str, Any]]:
    group, written = one.group, rollout_output([one.group])
    totals, masks = rule.totals(group.rewards), group.masks()
    for sample in range(group.job.num_generations):
        yield {
            "problem": one.problem,
            "wave": one.wave,
            "request": one.request,
            "sample": sample,
            "prompt_ids": written["prompt_ids"][sample],
            "completion_ids": written["completion_ids"][sample],
            "completion_mask": masks[sample],
            "reward": totals[sample],
            "rewards": group.rewards[sample],
        }
