"""Waits end, with a reason, and are never silent."""

from __future__ import annotations

import pytest

from async_grpo.errors import PeerDiedError, WaitTimeoutError
from async_grpo.telemetry import waiting
from async_grpo.telemetry.waiting import wait_until


def test_what_became_ready_is_returned_even_if_it_is_false() -> None:
    answers = iter([None, None, 0])
    assert wait_until(lambda: next(answers), what="x", timeout_s=60, poll_s=0) == 0


def test_the_deadline_names_what_was_waited_for() -> None:
    with pytest.raises(WaitTimeoutError, match="Timed out after 0 s waiting for version 3"):
        wait_until(lambda: None, what="version 3", timeout_s=0, poll_s=0)


def test_a_peer_that_is_gone_ends_the_wait() -> None:
    def gone() -> None:
        raise PeerDiedError("the server is gone")

    with pytest.raises(PeerDiedError):
        wait_until(lambda: None, what="x", timeout_s=1000, check_peer=gone)


def test_what_is_there_already_is_taken_though_the_peer_is_gone_and_the_time_is_up() -> None:
    def gone() -> None:
        raise PeerDiedError

    assert wait_until(lambda: "it", what="x", timeout_s=-1, check_peer=gone) == "it"


@pytest.mark.parametrize(("say_every_s", "times"), [(0.0, 2), (1000.0, 0)], ids=["long", "short"])
def test_a_long_wait_says_what_it_waits_for(
    say_every_s: float, times: int, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setattr(waiting, "SAY_EVERY_S", say_every_s)
    answers = iter([None, None, "it"])
    wait_until(lambda: next(answers), what="the weights", timeout_s=60, poll_s=0)
    assert [message.split(" (")[0] for message in messages] == ["waiting for the weights"] * times
