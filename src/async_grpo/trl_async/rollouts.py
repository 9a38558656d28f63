"""Jobs issued ahead, and finished groups taken once each: the queue of a run whose trainer is TRL's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from async_grpo.archive.history import ConsumptionRecord
from async_grpo.archive.room import write_with_room
from async_grpo.errors import UsageError
from async_grpo.queue import ServerQueue
from async_grpo.records import RolloutGroup
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import RunDir
from async_grpo.settings import DEFAULT_LIMIT
from async_grpo.setup.image_files import images_as_files
from async_grpo.telemetry.activity import TRAINING, activity
from async_grpo.training.checkpoints import UsedGroups
from async_grpo.training.job_issuer import JobIssuer
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.rollout_source import Publisher, RolloutSource
from async_grpo.trl_async.config import FIRST_VERSION, last_version, schedule_of

if TYPE_CHECKING:
    from trl.experimental.async_grpo import AsyncGRPOConfig


class Rollouts:
    """The rollouts of a run that has begun.

    Args:
        rows: dataset rows in the order of issue, without end.
        lock: of the run directory's server, which this process is.
        publisher: of the weights.
        append: adds one value of one metric to TRL's.
        check: called in every wait; raises where there is nothing to wait for.
    """

    def __init__(
        self,
        run: RunDir,
        run_id: str,
        args: AsyncGRPOConfig,
        rows: Iterator[dict[str, Any]],
        *,
        lock: KernelLock,
        publisher: Publisher,
        append: Callable[[str, float], None],
        check: Callable[[], None],
    ) -> None:
        self._args, self._check = args, check
        self.version = FIRST_VERSION  # of TRL's model
        self._metrics = RolloutMetrics(append)
        schedule = schedule_of(args)
        self._history = ConsumptionRecord(
            run.consumption, run_id=run_id, resumed_from=None, max_staleness=args.max_staleness
        )
        self._queue = ServerQueue.open(run.root, run_id, lock=lock)
        self._archive = UsedGroups(self._queue, run.root / "done", DEFAULT_LIMIT)
        issuer = JobIssuer(
            self._queue,
            rows,
            run_id=run_id,
            seed=args.seed,
            num_generations=args.num_generations,
            trainer_state=lambda: {"global_step": self.step, "max_steps": args.max_steps},
            archive=self._archive,
        )
        self._source = RolloutSource(
            queue=self._queue,
            issuer=issuer,
            schedule=schedule,
            publisher=publisher,
            history=self._history,
            metrics=self._metrics,
            should_stop=self._look,
        )
        last = last_version(args)
        self._source.ends_at = None if last is None else last + 2  # accelerate fetches beyond the last batch

    @property
    def step(self) -> int:
        """Optimizer steps done when the present version was sent."""
        return (self.version - FIRST_VERSION) * self._args.weight_sync_steps

    def begin(self) -> None:
        """Issue the first jobs: the first version is published."""
        self._metrics.training_begins()
        self._issue()

    def take(self) -> list[RolloutGroup]:
        """The next groups, which are in time for TRL. They count as used when the next version is there.

        Raises:
            AsyncGRPOError: no worker is left, all groups fail, or nothing came back for half an hour.
        """
        return self._source.take(self.version)

    def move_to(self, version: int) -> None:
        """TRL has sent this version of its weights."""
        self.version = version
        self._used()
        self._issue()

    def sum_up(self) -> dict[str, Any]:
        """Training is over: the figures of `summary.json`."""
        self._used()
        return {"steps": self.step, **self._metrics.totals()}

    def write_with_room(self, write: Callable[[], object], *, wait: bool) -> None:
        """Write every line that found no room yet, and call `write`, in which there may be no room either.

        Raises:
            DiskFullError: there is no room, and it is not to wait for some.
        """

        def write_all() -> None:
            self._history.sync()
            write()

        write_with_room(write_all, should_stop=lambda: not wait, make_room=self._archive.make_room)

    def close(self) -> None:
        """Stop being the server of the queue."""
        self._queue.close()
        self._history.close()

    def _used(self) -> None:
        self._history.used(self.step, self._source.trained())
        self._archive.checkpointed(self._source.state_at(self.step, passes_done=0))  # no resume will ask for them

    def _issue(self) -> None:
        activity.progress()
        activity.trains(step=self.step, total_steps=self._args.max_steps, max_staleness=self._args.max_staleness)
        activity.doing(TRAINING, version=self.version)
        self._metrics.workers_alive(len(self._queue.workers()))
        self._source.advance(self.version)

    def _look(self) -> bool:
        self._check()
        return False


def rows_of(dataset: Any) -> Iterator[dict[str, Any]]:
    """The rows of a dataset in its order, over and over: the order of TRL's own asynchronous worker.

    Raises:
        UsageError: it has none.
    """
    dataset, as_files = images_as_files(dataset)
    while True:
        rows = 0
        for rows, row in enumerate(dataset, 1):  # noqa: B007 - counted
            yield as_files(row)
        if rows == 0:
            raise UsageError("The train_dataset has no rows, so there is nothing to generate. Give it some.")
