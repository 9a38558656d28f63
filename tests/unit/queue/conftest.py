"""A queue in a private directory, with its server and worker 1 in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from queue_samples import RUN

from async_grpo.queue import ServerQueue, WorkerQueue


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerQueue]:
    with closing(ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)) as queue:
        yield queue


@pytest.fixture
def worker(server: ServerQueue) -> Iterator[WorkerQueue]:
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as queue:
        yield queue
