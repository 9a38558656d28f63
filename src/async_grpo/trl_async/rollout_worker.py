"""What TRL's asynchronous trainer is given: `FileQueueRolloutWorker`, and the weights that it sends to the workers."""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.api.functions import setup_of
from async_grpo.cli.compute.train import choose_weights, plan_devices
from async_grpo.errors import AsyncGRPOError, PeerDiedError, UsageError
from async_grpo.launch.launcher import LaunchOptions
from async_grpo.queue.liveness import live_workers
from async_grpo.rundir import paths as runs
from async_grpo.settings import TrainingSettings, WorkerSettings
from async_grpo.setup.devices import CPU
from async_grpo.trl_async.config import refuse, worker_values
from async_grpo.trl_async.on_cpu import let_trl_train_without_a_gpu
from async_grpo.trl_async.rollouts import Rollouts, rows_of
from async_grpo.trl_async.run import QueueRun
from async_grpo.trl_async.samples import samples_of
from async_grpo_ipc import SharedWeightTransfer
from async_grpo_ipc.control import MAX_SLOTS

if TYPE_CHECKING:
    from trl.experimental.async_grpo import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

ONE_TRAINING = "A FileQueueRolloutWorker serves one training. Make another for another one, and a trainer with it."


class FileQueueRolloutWorker:
    """A rollout worker for TRL's asynchronous trainer: several processes, a killed one costs nothing, no vLLM server.

    Args:
        get_trainer: what the workers load: a path, `"package.module:function"`, or a function. It returns a
            `trl.GRPOTrainer`, whose model, reward functions, tools and environments they use.
        args: of the `AsyncGRPOTrainer`. What it says about sampling holds for the workers, too.
        train_dataset: of the `AsyncGRPOTrainer`.
        workers: worker processes, by default one for each other GPU, and 2 on a CPU. 0: start them by hand, with the
            command that is logged.
        worker_devices: a GPU for each, such as `["1", "2"]`.
        run_dir: queue, logs and metrics of the run. A run that is over is moved aside.
        work: the options of `async-grpo worker`, such as `WorkerSettings(generator="vllm")`.

    Raises:
        AsyncGRPOError: an argument cannot be used; what, why, and what to do.

    Example:
        >>> rollouts = FileQueueRolloutWorker(get_trainer, args, dataset, workers=2)
        >>> AsyncGRPOTrainer(
        ...     model=MODEL, args=args, train_dataset=dataset, rollout_worker=rollouts, weight_transfer=rollouts.weights
        ... ).train()
    """

    def __init__(
        self,
        get_trainer: str | os.PathLike[str] | Callable[[], Any],
        args: AsyncGRPOConfig,
        train_dataset: Any,
        *,
        workers: int | None = None,
        worker_devices: Sequence[str] | None = None,
        run_dir: str | os.PathLike[str] = "worker",
        work: WorkerSettings = WorkerSettings(),  # noqa: B008 - it is frozen
    ) -> None:
        refuse(args)
        let_trl_train_without_a_gpu()
        self._args, self._rows = args, rows_of(train_dataset)
        setup = setup_of(get_trainer)
        options = LaunchOptions(
            config=setup.file,
            run_dir=Path(run_dir).expanduser().absolute(),
            **_devices(args, workers, worker_devices),
            work=work,
        )
        self._run = QueueRun(options, worker_values(args), setup.payload)
        self._rollouts: Rollouts | None = None
        self._stopped = False
        self._seen_alive = time.monotonic()  # a worker of the run
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.rollout_buffer = RolloutBuffer(self._next_samples)
        self.weights = RunWeights(self._run, options, timeout_s=args.weight_sync_timeout)

    @property
    def run_dir(self) -> Path:
        return self._run.dir.root

    def start(self) -> None:
        """Called by TRL when its first weights are sent."""
        if not self.weights.version:
            raise UsageError(
                "TRL's trainer sends its weights elsewhere, so the workers would never get them. Give it "
                "`weight_transfer=rollouts.weights`, where `rollouts` is this FileQueueRolloutWorker."
            )
        self._seen_alive = time.monotonic()
        self._rollouts = Rollouts(
            self._run.dir,
            self._run.run_id,
            self._args,
            self._rows,
            lock=self._run.lock,
            publisher=self.weights,
            append=lambda name, value: self.metrics_queue.put({name: value}),
            check=lambda: self.check_health(self._args.heartbeat_stale_after_s),
        )
        self._rollouts.begin()

    def update_model_version(self, model_version: int) -> None:
        """Called by TRL when it has sent one more version, the first before `start`."""
        if self._rollouts is not None:
            self._rollouts.move_to(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise where no worker will serve the run, or none has been alive for so many seconds."""
        self._run.check()
        now = time.monotonic()
        if live_workers(self.run_dir):
            self._seen_alive = now
        elif now - self._seen_alive > stale_after_s:
            raise PeerDiedError(
                f"For {stale_after_s:g} s (heartbeat_stale_after_s) no worker of {self.run_dir} has been alive. Their "
                f"logs there say why. Start one by hand: {self._run.command()}"
            )

    def stop(self) -> None:
        """Called by TRL when training ends, whatever ended it; the workers end, too."""
        error = sys.exc_info()[1]
        if self._stopped:
            return
        self._stopped = True
        error = None if error is self.weights.handled else error
        state = runs.FINISHED if error is None else runs.FAILED
        if isinstance(error, KeyboardInterrupt | SystemExit):
            state = runs.STOPPED
        with suppress(AsyncGRPOError, OSError) if error is not None else nullcontext():  # the first error is to be told
            self._end(state, wait=error is None)

    def _end(self, state: str, *, wait: bool) -> None:
        """`wait`: for room, where the disk is full."""
        rollouts, self._rollouts = self._rollouts, None
        if rollouts is None:
            self._run.end(state, {})
            return
        figures: dict[str, Any] = {}
        with closing(rollouts):
            try:
                figures = rollouts.sum_up()
            finally:
                self._run.end(state, figures, partial(rollouts.write_with_room, wait=wait))

    def _next_samples(self) -> Iterable[RolloutSample]:
        if self._stopped:
            raise UsageError(ONE_TRAINING)
        if self._rollouts is None:
            raise queue.Empty  # before `start`
        return chain.from_iterable(map(samples_of, self._rollouts.take()))


class RolloutBuffer(queue.Queue["RolloutSample"]):
    """The queue that TRL takes its rows from. Groups come into it when TRL asks for their first row, and not before.

    So no row grows stale in here, and all of the queue's work is done in the thread of the trainer.
    """

    def __init__(self, more: Callable[[], Iterable[RolloutSample]]) -> None:
        super().__init__()
        self._more = more

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """The next row. It waits as long as workers are alive: what ends that wait is an error of its own."""
        while self.empty():
            for sample in self._more():
                self.put_nowait(sample)
        return super().get(block=False)


class RunWeights(SharedWeightTransfer):
    """Publishes each version that TRL sends to the workers of a run, in shared memory."""

    held_at = None  # no version is ever held back

    def __init__(self, run: QueueRun, options: LaunchOptions, *, timeout_s: float) -> None:
        here = [device for device in options.worker_devices if device == options.master_device]
        slots = min(MAX_SLOTS, 2 + max(1, len(here)))  # each worker here reads one in place; the newest; one to write
        super().__init__(None, run.dir.weights_handle, slots=slots, way=options.training.weights, timeout_s=timeout_s)
        self._run = run
        self.handled: BaseException | None = None  # that the caller of `train` was in the middle of handling

    def init_weight_transfer(self) -> None:
        """Called by TRL before its first weights are sent, and before `FileQueueRolloutWorker.start`."""
        if self._run.run_id:
            raise UsageError(ONE_TRAINING)
        self.handled = sys.exc_info()[1]
        self._run.begin()

    def retry(self) -> None:
        """Nothing is due: `send_weights` returns when the version is published."""


def _devices(args: AsyncGRPOConfig, workers: int | None, worker_devices: Sequence[str] | None) -> dict[str, Any]:
    """The devices of `LaunchOptions`, and the way of the weights between them."""
    here = CPU if args.device.type == "cpu" else str(args.device.index or 0)
    named = None if worker_devices is None else ",".join(worker_devices)
    if workers is not None and workers < 0:
        raise UsageError(f"workers must be 0 or more, got {workers}.")
    if workers == 0 and named is not None:
        raise UsageError(f"workers=0 starts none, and worker_devices={named} names their GPUs. Leave one of them out.")
    if here != CPU and args.world_size > 1 and named is None and workers != 0:
        raise UsageError(
            f"TRL's trainer takes {args.world_size} GPUs, so say which are left for the workers: worker_devices=[...]."
        )
    chosen = () if workers == 0 else plan_devices(here, named, workers)[1]
    return {
        "master_device": here,
        "worker_devices": chosen,
        "training": choose_weights(TrainingSettings(), here, chosen),
    }
