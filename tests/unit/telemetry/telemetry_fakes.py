"""What several tests of this folder share."""

from __future__ import annotations

from pathlib import Path

from async_grpo.telemetry.activity import LOADING, Activity


def worker(root: Path, name: str = "dev1", state: str = LOADING) -> Activity:
    """A process of the run in `root` that writes what it does."""
    writer = Activity()
    writer.publish(root, name, device="cpu", run_id="run", state=state)
    return writer
