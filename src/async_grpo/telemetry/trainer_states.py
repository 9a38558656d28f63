"""`trainer_states.jsonl`: the state of the server's trainer at the beginning of each optimizer step, log included.

That is what reward functions see in plain TRL: the step before is logged, evaluated and saved, and the callbacks have
run. A worker's job of that step may be issued earlier, so a worker reads here what only then is known.

A line is one of three: `{"begins": 3}`, where a server begins at that step and its log starts again;
`{"logged": {…}}`, an entry of the log; `{"step": 3, "state": {…}}`, the other fields. NaN and infinity are written as
Python does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.rundir.files import LineFile
from async_grpo.rundir.reading import LineReader, parse_object
from async_grpo.rundir.shape import shaped


class StateWriter(LineFile):
    """Appends to the file of a run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._logged = 0  # entries that are in the file

    def begins(self, step: int) -> None:
        self._logged = 0
        self._put({"begins": step})

    def step(self, step: int, state: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> None:
        """Args: log: all entries until now."""
        for entry in log[self._logged :]:
            self._put({"logged": entry})
        self._logged = len(log)
        self._put({"step": step, "state": state})

    def _put(self, line: Mapping[str, Any]) -> None:
        self.append(json.dumps(line, default=_plain))


def _plain(value: Any) -> Any:
    """Numbers of numpy or torch; anything else as text, which transformers could not save either."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class StateAt(NamedTuple):
    """The trainer's state at the beginning of a step."""

    fields: Mapping[str, Any]
    log: list[dict[str, Any]]


class StateReader:
    """Follows the file of a run; may be used by several threads."""

    def __init__(self, path: Path) -> None:
        self._reader = LineReader(path)
        self._changing = threading.Lock()
        self._began = 0
        self._log: list[dict[str, Any]] = []
        self._at: dict[int, tuple[dict[str, Any], int]] = {}  # fields, and how many entries the log had

    def at(self, step: int) -> StateAt | None:
        """None: it will come. `BadFileError`: the file is not one of ours.

        Where it will not come, it is the nearest that is there: a server that has ended had issued a job at this step.
        """
        with self._changing:
            for line in self._reader.new_lines():
                self._take(parse_object(line))
            will_come = step - 1 in self._at or self._began == step or not self._at
            return None if will_come and step not in self._at else self._newest(step)

    def newest(self, step: int) -> StateAt | None:
        """The state of the last step up to this one; None: there is none."""
        found = self.at(step)
        with self._changing:
            return found or self._newest(step)

    def _newest(self, step: int) -> StateAt | None:
        if not self._at:
            return None
        fields, logged = self._at[max((one for one in self._at if one <= step), default=min(self._at))]
        return StateAt(fields, self._log[:logged])

    def _take(self, line: dict[str, Any]) -> None:
        if "begins" in line:
            self._began, self._log = shaped(int, line["begins"], "begins"), []
            self._at = {}
        elif "logged" in line:
            self._log.append(shaped(dict[str, Any], line["logged"], "logged"))
        else:
            state = shaped(dict[str, Any], line.get("state"), "state")
            self._at[shaped(int, line.get("step"), "step")] = state, len(self._log)
