"""A worker that ends the run, and the server that hears of it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from async_grpo.errors import BadFileError, RunRefused
from async_grpo.queue import ServerQueue
from async_grpo.rundir import refusal
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir
from kit.plans import planned


def test_the_server_ends_with_the_sentence_of_the_first_worker_that_refuses(tmp_path: Path) -> None:
    with closing(ServerQueue.open(tmp_path, "run", watch_workers=False)) as server:
        assert server.finished() == []
        refusal.write_refusal(tmp_path, "dev2", RunRefused("rollout_func returned no log-probabilities."))
        with pytest.raises(RunRefused, match=r"^rollout_func returned no log-probabilities\.$"):
            server.finished()


def test_a_resume_asks_the_workers_again(tmp_path: Path) -> None:
    root, config = tmp_path / "worker", tmp_path / "my_trainer.py"
    state = prepare(root, planned(config))
    RunDir(root).update_state(of=state.run_id, state="failed", step=3)
    refusal.write_refusal(root, "dev1", RunRefused("no"))
    assert refusal.read_refusal(root) == refusal.Refusal("dev1", "no")
    prepare(root, planned(config, resume=True))
    assert refusal.read_refusal(root) is None


def test_a_file_of_others_is_named(tmp_path: Path) -> None:
    (tmp_path / refusal.FILE).write_text('{"worker": 1}')
    with pytest.raises(BadFileError, match=r"refused\.json"):
        refusal.raise_refusal(tmp_path)
