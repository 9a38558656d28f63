"""Publishes the policy after every optimizer step, and never makes training wait for a reader."""

from __future__ import annotations

from loguru import logger

from async_grpo_ipc import WeightExporter


class WeightPublication:
    """The newest policy version, for the workers to adopt.

    While every other slot is being read a version cannot be published; it is tried again before the next wait for
    rollouts, so a slow reader costs freshness and never time.
    """

    def __init__(self, exporter: WeightExporter) -> None:
        self._exporter = exporter
        self._due: int | None = None
        self._late = False

    @property
    def version(self) -> int | None:
        """The newest version that workers can see, None before the first."""
        return self._exporter.version

    def publish(self, version: int) -> None:
        """Publish the model's weights as they are now as `version`, now or at the next `retry()`."""
        self._due = version
        self.retry()
        if self._due is not None and not self._late:
            self._late = True
            logger.debug("version {} waits for a free slot: readers hold every other one", version)

    def retry(self) -> None:
        """Publish what found no free slot before. Must not be called while the optimizer changes the weights."""
        if self._due is not None and self._exporter.publish(self._due):
            self._due, self._late = None, False
