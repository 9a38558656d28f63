"""A folder in which tests run tasks that are shell scripts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from async_grpo_experiments.slots.ledger import Ledger, Record
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.slots.schedule import Command, Task, TaskSchedule

TWO_PLACES = [Place(name="a"), Place(name="b")]


class Yard:
    """A folder with a ledger and the tasks' logs; keeps what was said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def task(self, name: str, script: str, **more: Any) -> Task:
        def command(place: Place) -> Command:
            env = {**os.environ, "PLACE": place.name}
            return Command(["sh", "-c", script], env, self.folder / f"{name}.log")

        return Task(name=name, command=command, **more)

    def schedule(self, *tasks: Task, places: list[Place] | None = None, **more: Any) -> TaskSchedule:
        ledger = Ledger(self.folder / "slots.jsonl")
        return TaskSchedule(tasks, places or TWO_PLACES, ledger, say=self.said.append, **more)

    def alone(self, task: Task, **place: Any) -> Record:
        """What became of a task that has the only place."""
        return self.schedule(task, places=[Place(name="x", **place)]).run()[task.name]

    def wrote(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return log.read_text() if log.exists() else ""
