"""Commands that a test calls in its own process, and what they say. A `conftest.py` imports the fixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_grpo.cli import main

Says = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Says:
    """What a command writes to stderr that is refused: its exit code is 2."""

    def call(*command: object) -> str:
        try:
            code = main([*map(str, command)])
        except SystemExit as exit:
            code = int(exit.code or 0)
        said = capsys.readouterr()
        assert code == 2, said
        return said.err

    return call


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Says:
    """What a command prints that ends with `code`; nothing goes to stderr where it is 0."""

    def call(*command: object, code: int = 0) -> str:
        ended = main([*map(str, command)])
        said = capsys.readouterr()
        assert ended == code and (code or not said.err), said
        return said.out

    return call
