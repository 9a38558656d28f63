"""Whether a finished group is a result of the job that was issued."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from operator import attrgetter

from async_grpo.errors import BadFileError
from async_grpo.images import EncodedImage
from async_grpo.queue.codec import decode_group
from async_grpo.queue.names import JobName
from async_grpo.records import Job, RolloutGroup

_question = attrgetter(
    *(field.name for field in fields(Job) if field.name not in ("born_version", "min_version", "trainer_state"))
)
_as_json = partial(json.dumps, default=lambda value: value.data.hex() if type(value) is EncodedImage else repr(value))


def read_result(data: bytearray, name: JobName, run_id: str, *, most_attempt: int) -> RolloutGroup:
    """The group in a file. `BadFileError` if it is none, or of an attempt that nobody can have made.

    Args:
        most_attempt: that can have been issued until now.
    """
    if name.attempt > most_attempt:
        raise BadFileError(f"attempt {name.attempt} of this job was never made: there were at most {most_attempt + 1}")
    return decode_group(data, name, run_id)


def asks_the_same(made: Job, issued: Job) -> bool:
    """Whether two jobs agree in all but their versions and the trainer's state, which a resumed run sets again."""
    asked, expected = _question(made), _question(issued)
    try:
        return asked == expected or _as_json(asked) == _as_json(expected)  # NaN does not equal NaN
    except RecursionError:  # no row that was issued is nested so deeply
        return False
