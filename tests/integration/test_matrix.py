"""The rows of `matrix`: what we train at staleness 0 is what plain TRL trains on the same completions, or it shows.

Each is some seconds, so `make test-matrix` runs them, and `make test` does not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compared_with_trl import largest_difference
from in_process import InProcessRun, replay_with_trl, training_logs
from matrix import ROWS, get_trainer_of

from async_grpo.errors import AsyncGRPOError, UnsupportedError
from async_grpo.training.trl_trainer import refuse_unsupported

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SHOWS = 0.02  # nats: a mean difference of log-probabilities that no rounding of fp32 explains


@pytest.mark.parametrize("name", ROWS)
def test_it_trains_as_trl_does_or_it_shows(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    get_trainer = get_trainer_of(row, tmp_path)
    if row.fails:
        with pytest.raises((AttributeError, RuntimeError)):
            get_trainer().train()
        return
    if row.refused:
        with pytest.raises(UnsupportedError, match=row.refused):
            refuse_unsupported(get_trainer())
        return
    try:
        run = InProcessRun(get_trainer).train()
    except AsyncGRPOError:
        assert row.differs, "it is refused"
        return
    if row.differs:
        assert max(entry["async/logprob_mismatch"] for entry in run.logs) > SHOWS
        return
    assert run.logs[0]["grad_norm"] > 0
    plain = replay_with_trl(get_trainer, run.batches)
    largest_difference(run.logs, training_logs(plain), row.within)
