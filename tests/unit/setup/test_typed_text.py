"""Text of `key=value` as values of a type; tests/examples/test_examples_sagemaker.py has the refusals of a job."""

from __future__ import annotations

import pytest

from async_grpo.errors import UsageError
from async_grpo.setup.typed_text import typed


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("False", bool, False),
        ("TRUE", bool, True),
        (" 0 ", bool, False),
        ('"true"', bool, True),
        (" 1e-6 ", float, 1e-6),
        ("-1", int, -1),
        ('"mt_grpo"', str, "mt_grpo"),
        ("/a=b.parquet", str, "/a=b.parquet"),
        (3, int, 3),
    ],
)
def test_text_gets_its_type(text: object, kind: type, value: object) -> None:
    found = typed("key", text, kind)
    assert found == value
    assert type(found) is kind


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [("1e3", int, "key must be a whole number, got '1e3'"), ("inf", float, "finite"), (" ", str, "key is empty")],
)
def test_text_of_another_type_is_refused(text: str, kind: type, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        typed("key", text, kind)
