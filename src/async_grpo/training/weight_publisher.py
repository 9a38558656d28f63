"""Publishes the policy after every optimizer step, and never makes training wait for a reader."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from async_grpo.errors import RunRefused, WeightsError
from async_grpo.formatting import for_people
from async_grpo.log import logger
from async_grpo.setup.fingerprints import count
from async_grpo.setup.generator_choice import Capabilities
from async_grpo.training.sharding import sharding_of
from async_grpo_ipc import IPCError, WeightExporter
from async_grpo_ipc.control import MAX_SLOTS
from async_grpo_ipc.errors import MismatchError

if TYPE_CHECKING:
    from torch import nn
    from trl import GRPOTrainer

    from async_grpo.rundir.paths import RunDir, RunState
    from async_grpo.rundir.run_plan import RunPlan

Gather = Callable[[Mapping[str, torch.Tensor]], None]
SAY_AFTER_S = 10.0  # warn when workers see no new version for this long, and again as often
SLOTS_OF_PULLERS = 2  # the newest, which readers copy and let go, and one to write into
MIN_SLOTS = 3  # one that is being read, the newest, and one to write into
EXTRA_BYTES = 256 * 2**20  # that further slots may take


def slots_for(model: nn.Module, *, max_staleness: int, sharing: int | None, readers: int = 0) -> int:
    """How many versions of the weights are kept at a time, so that one can nearly always be published.

    A worker on the server's device reads a version in place as long as it generates a batch, so each may hold another
    one. None of them is more than `max_staleness` behind the newest, so they hold no more than that many besides it. A
    large model gets no slot for this: a version that waits for one costs freshness, and memory may be short.

    Args:
        sharing: workers that read a version in place; None: unknown.
        readers: what else reads a version to copy it: into a chain of deltas, to other machines.
    """
    held = max_staleness if sharing is None else min(sharing, max_staleness)
    slot_bytes = sum(count(p) * p.element_size() for p in model.parameters() if p.requires_grad)
    extra = min(held - 1, EXTRA_BYTES // max(1, slot_bytes))
    least = SLOTS_OF_PULLERS if sharing == 0 else MIN_SLOTS
    return min(least + max(0, extra) + readers, MAX_SLOTS)


def slots_of(model: nn.Module, plan: RunPlan, engine: Capabilities | None) -> int:
    """`slots_for` the workers of a run: those that sample with vLLM copy a version into its model, and let it go.

    Args:
        engine: of the workers that the launcher starts.
    """
    in_place = plan.workers_sharing if engine and engine.in_place else 0
    return slots_for(
        model,
        max_staleness=plan.training.max_staleness,
        sharing=in_place if plan.num_workers else None,
        readers=(plan.training.delta_every > 0) + (plan.launch.ray is not None),
    )


def exporter_of(
    trainer: GRPOTrainer, run: RunDir, state: RunState, gather: Gather, engine: Capabilities | None
) -> Callable[[], WeightExporter]:
    """Return what makes the exporter, once the model is where it trains.

    Args:
        gather: copies whole tensors into these, where each rank has a part of the model.
        engine: of the workers that the launcher starts.
    """
    model = trainer.model
    plan = state.plan
    slots = slots_of(model, plan, engine)
    dtype = torch.bfloat16 if plan.training.publish_dtype == "bf16" else None
    if (sharding := sharding_of(trainer)) is None:
        return lambda: WeightExporter.from_model(
            model, run.weights_handle, slots=slots, way=plan.weights, share_frozen=True, dtype=dtype
        )
    blueprint = sharding.blueprint(model)
    device = trainer.accelerator.device
    return lambda: WeightExporter.from_blueprint(
        blueprint, gather, run.weights_handle, device=device, slots=slots, way=plan.weights
    )


class VersionKeeper(Protocol):
    """Keeps versions of the weights on disk, such as `deltas.recorder.DeltaRecorder`."""

    def reached(self, version: int, exporter: WeightExporter) -> None:
        """The trainer's weights are `version` now: keep it if it is due."""

    def close(self) -> None:
        """Keep the newest version too, and wait until all is on the disk."""


class WeightPublisher:
    """The newest policy version, for the workers to adopt.

    While every other slot is being read a version cannot be published; it is tried again before the next wait for
    rollouts, so a slow reader costs freshness and never time.

    Args:
        open_exporter: called with the first version, when the trainer has put the model where it trains.
        keeper: keeps the versions, also those that are not published: an evaluation holds an older one still, or
            no slot is free.
    """

    def __init__(self, open_exporter: Callable[[], WeightExporter], keeper: VersionKeeper | None = None) -> None:
        self._keeper = keeper
        self._open_exporter = open_exporter
        self._exporter: WeightExporter | None = None
        self._due: int | None = None
        self.held_at: int | None = None  # the newest version that may be seen until `release()`
        self._late_since: float | None = None  # when a version last began to wait for a slot (monotonic seconds)
        self._say_at = 0.0

    @property
    def version(self) -> int | None:
        """The newest version that workers can see, None before the first."""
        return None if self._exporter is None else self._exporter.version

    def publish(self, version: int) -> None:
        """Publish the model's weights as they are now as `version`, now or at the next `retry()`."""
        self._due = version
        self.retry()
        if self._keeper is not None and self._exporter is not None:
            self._keeper.reached(version, self._exporter)

    def hold(self) -> int | None:
        """Let workers see no newer version than now until `release()`; returns this version, None before the first."""
        self.held_at = self.version
        logger.debug("version {} is held: an evaluation samples with it", self.held_at)
        return self.held_at

    def release(self) -> None:
        """Publish again; the version that was due meanwhile at the next `retry()`."""
        self.held_at = None

    def retry(self) -> None:
        """Publish what is due: it found no free slot, or was held back.

        Must not be called while the optimizer changes the weights.
        """
        if self._due is None or self.held_at is not None:
            return
        if self._exporter is None:
            try:
                self._exporter = self._open_exporter()
            except IPCError as error:
                raise WeightsError(str(error)) from error
        if self._published(self._exporter, self._due):
            logger.debug("version {} is published", self._due)
            self._due = self._late_since = None
        else:
            self._late(self._due)

    def _published(self, exporter: WeightExporter, version: int) -> bool:
        try:
            return exporter.publish(version)
        except MismatchError as error:
            changed = str(error).partition(", so ")[0].partition(" Make a new exporter")[0].rstrip(".")
            raise RunRefused(
                f"The model has other parameters that train than when the run began: {changed}. Workers get those "
                "that trained then. Let a parameter or an adapter that trains later have requires_grad from the start, "
                "and stop its gradient until then, or train in one process (without --distributed)."
            ) from error

    def _late(self, version: int) -> None:
        now = time.monotonic()
        if self._late_since is None:
            self._late_since, self._say_at = now, now + SAY_AFTER_S
            logger.debug("version {} waits for a free slot: readers hold every other one", version)
        elif now >= self._say_at:
            self._say_at = now + SAY_AFTER_S
            logger.warning(
                "for {} no new version of the weights could be published, so rollouts grow stale: workers on the "
                "server's device hold every older version until their batches are generated. Shorter batches "
                "(--groups-per-claim 1) or fewer workers there let version {} through sooner",
                for_people(now - self._late_since),
                version,
            )

    def close(self) -> None:
        """Withdraw the weights: workers that ask for them see that there is no publisher."""
        if self._keeper is not None:
            self._keeper.close()
        if self._exporter is not None:
            self._exporter.close()
