"""As many open jobs as the queue holds, while workers rename their files as fast as they can."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest
from queue_samples import RUN, make_job, serve, take_all

from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.queue.server import MAX_OPEN

DEADLINE_S = 300.0


@pytest.mark.slow
def test_no_job_is_taken_for_missing_where_a_listing_misses_it(tmp_path: Path) -> None:
    with closing(ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)) as server:
        for seq in range(MAX_OPEN):
            server.submit(make_job(seq))
        ends_at = time.monotonic() + DEADLINE_S
        taken: list[int] = []

        def work(number: int) -> None:
            with closing(WorkerQueue.open(server.root, number, "cpu", durable=False)) as worker:
                while len(taken) < MAX_OPEN and time.monotonic() < ends_at:
                    serve(worker)

        threads = [Thread(target=work, args=(number,)) for number in (1, 2, 3)]
        for thread in threads:
            thread.start()
        while len(taken) < MAX_OPEN and time.monotonic() < ends_at:
            taken += take_all(server)
        for thread in threads:
            thread.join()
        assert sorted(taken) == list(range(MAX_OPEN))
        assert (server.healing.missing, server.healing.duplicates) == (0, 0)
