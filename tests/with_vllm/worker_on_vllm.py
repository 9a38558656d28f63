"""A worker on the real engine, with a queue of three groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from async_grpo.engines.continuous import ContinuousEngine
from async_grpo.engines.vllm import VLLMEngine
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.records import RolloutGroup
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.rollout.worker import Worker, WorkerContext
from async_grpo.settings import WorkerSettings
from kit.groups import RUN
from kit.in_process import jobs_of

ROW = {"prompt": [{"role": "user", "content": "3*4?"}]}
GROUPS, GROUP_SIZE = 3, 2


class OwnWeights:
    """The trainer's weights, as a worker leases them."""

    version, newest = 0, ("one", 0)

    def __init__(self, model: Any) -> None:
        self._tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}

    @contextmanager
    def lease(self) -> Iterator[Any]:
        yield SimpleNamespace(items=self._tensors.items, version=0, generation="one")

    def intact(self, *, wait: bool) -> bool:
        return True

    def release(self) -> None:
        """Nothing is held between two leases."""


def served(trainer: Any, folder: Path) -> list[RolloutGroup]:
    folder.mkdir(mode=0o700)
    server, queue = ServerQueue.open(folder, RUN), WorkerQueue.open(folder, 1, "cpu")
    for job in jobs_of([ROW] * GROUPS, GROUP_SIZE):
        server.submit(job)
    engine = VLLMEngine(trainer, seed=0)
    context = WorkerContext(
        trl=RolloutTrainer(trainer),
        queue=queue,
        weights=OwnWeights(trainer.model),  # type: ignore[arg-type]
        run=SimpleNamespace(root=folder, read_state=lambda: SimpleNamespace(state="running")),  # type: ignore[arg-type]
        should_stop=lambda: len(server.finished()) == GROUPS,
        settings=WorkerSettings(),
        deterministic=False,
    )
    try:
        Worker(context, ContinuousEngine(engine, group_size=GROUP_SIZE)).run()
    finally:
        engine.close()
    groups = [server.take(entry) for entry in server.finished()]
    return [group for group in groups if group is not None]
