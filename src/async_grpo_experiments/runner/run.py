"""The stages of an experiment as tasks of a queue: what each needs, how it starts, and when it is done."""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from async_grpo.errors import BadFileError, DiskFullError
from async_grpo.formatting import counted
from async_grpo.rundir.files import LineFile, write_json
from async_grpo_experiments.runner import states
from async_grpo_experiments.runner.config import OWN_PROCESSES, ExperimentConfig
from async_grpo_experiments.runner.graph import Stage, chains_left, keys_of, kind_of, named, stages_by_job
from async_grpo_experiments.runner.peaks import GpuUse, MemoryPeaks, StageSeconds, StageUse, way_out
from async_grpo_experiments.runner.states import OnDisk, state_of
from async_grpo_experiments.slots.foreground import QueueScreen, stamped, stopped_by_signals
from async_grpo_experiments.slots.ledger import BLOCKED, FAILED, FINISHED, RUNNING, WAITING, Ledger, Record
from async_grpo_experiments.slots.places import Need, Place
from async_grpo_experiments.slots.schedule import Command, Task, TaskSchedule
from async_grpo_experiments.slots.starter import OpenStarter

NAME, RUN_LOG = "experiment", "run.log"
COLUMNS = ("job", "state", "running", "took")
JOB_STATES, MEMORY, SECONDS = "job_states.json", "memory.json", "seconds.json"
GRACE_S = 15.0
CommandOf: TypeAlias = Callable[[Path, Stage, str], Sequence[str]]  # folder, stage, token: a command line


class ExperimentLog(LineFile):
    """`run.log` of an experiment."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / RUN_LOG)

    def say(self, text: str) -> None:
        """Print a line, and note it."""
        print(stamped(NAME, text), flush=True)
        self.note(text)

    def note(self, text: str) -> None:
        """Write a line to the file alone."""
        self.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


class ExperimentRun:
    """One process's work on an experiment."""

    def __init__(
        self,
        root: Path,
        config: ExperimentConfig,
        graph: Mapping[str, Stage],
        found: OnDisk,
        ledger: Ledger,
        log: ExperimentLog,
        memory: MemoryPeaks,
        wanted: Collection[str],
    ) -> None:
        self._root, self._config, self._graph, self._ledger, self._log = root, config, graph, ledger, log
        self._digests = dict(found.done)
        self._wanted = wanted
        self._jobs = stages_by_job(graph)
        self._memory = memory
        self._written = ""
        self._said_idle = self._said_full = False
        self._use = GpuUse([])
        self._screen = QueueScreen(
            NAME, COLUMNS, self.jobs, self.line, note=log.note, caption=lambda: self._use.summary()
        )

    def run(self, places: Sequence[Place], command: CommandOf, open_starter: OpenStarter) -> bool:
        """Run all that has not finished; returns whether a stop was asked for."""
        self._settle_ledger()
        self._use, self._places = GpuUse(places), places
        priorities = self._priorities()
        tasks = [
            self._task(stage, command, priorities[name]) for name, stage in self._graph.items() if name in self._wanted
        ]
        schedule = TaskSchedule(
            tasks,
            places,
            self._ledger,
            say=self._screen.say,
            look=self._look,
            stagger_s=self._config.scheduling.stagger_s,
            open_starter=open_starter,
        )
        left = len(self._graph) - len(self._digests)
        stages, on = counted(len(self._graph), "stage"), ", ".join(place.name for place in places)
        self._screen.say(f"{counted(len(self._jobs), 'job')}, {left} of {stages} to run on {on}; in {self._root}")
        stopped_by_signals(schedule.stop)
        with self._screen:
            schedule.run()
        self._write_states()
        took = {
            kind_of(stage, self._config): self._ledger.records[name].seconds
            for name, stage in self._graph.items()
            if name in self._digests and self._ledger.records[name].seconds
        }
        StageSeconds(self._root.parent.parent / SECONDS).note(took)
        return schedule.stopping

    def _look(self) -> None:
        self._use.look(self._running())
        self._screen.look()
        self._write_states()
        self._tell_idle()

    def jobs(self) -> Iterator[tuple[str, str, str, str]]:
        """For each job its name, its state, what runs of it where, and the seconds that its stages took."""
        records = self._ledger.records
        done = frozenset(name for name, record in records.items() if record.state == FINISHED)
        for job, own in self._jobs.items():
            now = [stage for stage in own if records[stage.name].state == RUNNING]
            seconds = sum(records[stage.name].seconds for stage in own)
            doing = ", ".join(f"{stage.kind} on {records[stage.name].place}" for stage in now)
            yield job.id, state_of(own, done, records), doing, f"{seconds:.0f} s"

    def line(self) -> str:
        """How many jobs are in which state, and what runs where."""
        rows = list(self.jobs())
        known = Counter(state.partition(" ")[0] for _, state, _, _ in rows)
        running = "; ".join(f"{job}: {doing}" for job, _, doing, _ in rows if doing)
        counts = ", ".join(f"{count} {state}" for state, count in known.items())
        return " | ".join(filter(None, [counts, running, self._use.summary()]))

    def _settle_ledger(self) -> None:
        """The folders say what is finished; the ledger of a killed runner may say something else.

        What failed before and is not wanted now keeps its state and its reason.
        """
        for name in self._graph:
            record = self._ledger.records.get(name, Record(task=name, state=WAITING))
            state = FINISHED if name in self._digests else WAITING
            if state == WAITING and name not in self._wanted and record.state in (FAILED, BLOCKED):
                continue
            if record.state != state or name not in self._ledger.records:
                self._ledger.put(Record(task=name, state=state, seconds=record.seconds, peak_bytes=record.peak_bytes))

    def _priorities(self) -> Mapping[str, float]:
        if not self._config.scheduling.priority:
            return chains_left(self._graph, self._took())
        own = named(self._config.scheduling.priority)
        return {name: own(stage.job, self._config) for name, stage in self._graph.items()}

    def _task(self, stage: Stage, command: CommandOf, priority: float) -> Task:
        config, folder = self._config, self._root / stage.folder

        def begin(place: Place) -> Command:
            inputs = {need: self._digests[need] for need in stage.needs}
            attempt = states.begin(folder, states.MadeOf(inputs=inputs, keys=keys_of(config, stage)))
            token = states.token_of(attempt)
            arguments = command(self._root, stage, token)
            env = place.environment(os.environ)
            self._log.note(f"{stage.name}: {shlex.join(arguments)}")
            if config.system.engine == "local":  # else the job's own environment says it, in the stage's log
                self._log.note(f"{stage.name} on {place.name}, CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']!r}")
            return Command(arguments, env, log_of(self._root, stage), token)

        def unfinished() -> str:
            try:
                manifest = states.manifest_of(folder)
            except BadFileError as error:
                return str(error)
            if manifest is None:
                return f"it ended without leaving {folder}"
            self._digests[stage.name] = states.digest(manifest)
            return ""

        return Task(
            name=stage.name,
            command=begin,
            needs=stage.needs,
            need=self._need(stage),
            need_now=partial(self._need, stage),
            priority=priority,
            deadline_s=_limit(config.scheduling.deadline_s),
            silence_s=_limit(config.scheduling.silence_s),
            grace_s=GRACE_S,
            unfinished=unfinished,
            peak_bytes=partial(self._ended, stage),
            ran_out=lambda: any((partial / states.RAN_OUT).exists() for partial in states.partials(folder)),
            way_out=partial(way_out, stage, config),
        )

    def _need(self, stage: Stage) -> Need:
        """What a stage takes of the places. Of a cluster's places each is a whole job."""
        system = self._config.system
        nbytes = self._memory.needed(stage, self._config)
        if nbytes is not None and nbytes > max((place.bytes or 0 for place in self._places), default=0):
            nbytes = None  # it has run alone, and its margin asks for more than there is
        gpus = 1 if system.engine == "slurm" else system.gpus_per_job
        return Need(gpus=gpus, bytes=nbytes, spreads=stage.kind == "generate" and bool(self._use))

    def _ended(self, stage: Stage) -> int:
        """Note what was seen of a stage's GPUs; returns the most memory that it had."""
        use = self._use.take(stage.name)
        if self._use:
            self._log.note(f"GPU utilization {stage.name}: {use.in_words()}")
            self._end_log(stage, use)
        return self._memory.peak_of(stage, self._root / stage.folder, self._config, use.peak_bytes)

    def _end_log(self, stage: Stage, use: StageUse) -> None:
        """End the log of a stage with its GPUs' memory, where its own process has none of it and cannot say so."""
        log = log_of(self._root, stage)
        if log.exists() and (stage.kind != "train" or stage.job.algo in OWN_PROCESSES):
            with suppress(OSError), log.open("a") as file:
                file.write(use.memory_summary())

    def _running(self) -> dict[str, str]:
        """The place of each stage that runs."""
        records = self._ledger.records
        return {name: records[name].place for name in self._graph if records[name].state == RUNNING}

    def _took(self) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], list[float]] = {}
        for name, stage in self._graph.items():
            if name in self._digests and (seconds := self._ledger.records[name].seconds):
                found.setdefault((stage.job.algo, stage.kind), []).append(seconds)
        return {key: fmean(values) for key, values in found.items()}

    def _write_states(self) -> None:
        """The view for people and other programs. A full disk leaves the last one."""
        now = {job: {"state": state, "running": doing, "took": took} for job, state, doing, took in self.jobs()}
        if (text := json.dumps([(job, one["state"], one["running"]) for job, one in now.items()])) == self._written:
            return
        try:
            write_json(self._root / JOB_STATES, now)
            self._written = text
        except DiskFullError as error:  # tried again at the next look
            if not self._said_full:
                self._screen.say(f"{JOB_STATES} is not the newest, and waits for room: {error}")
            self._said_full = True

    def _tell_idle(self) -> None:
        """Say once why places are idle."""
        if self._said_idle:
            return
        records, running = self._ledger.records, self._running()
        waiting = [stage for stage in self._graph.values() if records[stage.name].state == WAITING]
        ready = [stage for stage in waiting if all(records[need].state == FINISHED for need in stage.needs)]
        idle = len(self._places) - len({name for place in running.values() for name in place.split("+")})
        if idle > 0 and running and waiting and not ready:
            self._said_idle = True
            more = f" and {len(running) - 1} more" if len(running) > 1 else ""
            of = counted(len(self._places), "GPU" if self._use else "place")
            self._screen.say(
                f"{idle} of {of} are idle: {counted(len(waiting), 'stage')} wait for {min(running)}{more}, and no "
                "other fits. More lines, or num_samples, would use them."
            )


def log_of(root: Path, stage: Stage) -> Path:
    return (root / stage.folder).with_name(f"log_{stage.kind}.txt")


def _limit(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
