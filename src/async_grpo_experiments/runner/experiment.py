"""An experiment from its start to its results: look what is there, run what is not, sum up."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from async_grpo.errors import BadFileError, DiskFullError, RunDirError, UsageError
from async_grpo.formatting import counted, printable
from async_grpo.launch.child_log import last_line
from async_grpo.rundir.files import LineFile, write_json, write_lines
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.locks import KernelLock, describe_holder
from async_grpo.rundir.reading import read_file, read_object
from async_grpo.rundir.shape import as_json
from async_grpo.rundir.summary import program
from async_grpo.setup.devices import visible_gpus
from async_grpo.setup.output import survive_lost_output
from async_grpo_experiments.runner import states
from async_grpo_experiments.runner.config import ExperimentConfig, checked
from async_grpo_experiments.runner.graph import ExperimentJob, Stage, around, below, graph_of, keys_of
from async_grpo_experiments.runner.priority import chain_left, named
from async_grpo_experiments.runner.results import write_results
from async_grpo_experiments.runner.screen import open_screen
from async_grpo_experiments.slots.ledger import (
    BLOCKED,
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    WAITING,
    Ledger,
    Record,
    end_leftovers,
    read,
)
from async_grpo_experiments.slots.packing import Need
from async_grpo_experiments.slots.places import Place, core_places, gpu_places
from async_grpo_experiments.slots.schedule import ON_THIS_MACHINE, Command, Task, TaskSchedule
from async_grpo_experiments.slots.starter import OpenStarter

LEDGER, LOCK, JOB_STATES, MEMORY, RUN_LOG, CONFIG = (
    "slots.jsonl",
    "experiment.lock",
    "job_states.json",
    "memory.json",
    "run.log",
    "config.yaml",
)
GRACE_S = 15.0
STOPPED_CODE = 130  # as a shell has it for Ctrl-C
MARGIN = 1.1  # of a measured peak
NOT_STARTED = "NOT_STARTED"
_DONE = {"generate": "DATA_GENERATED", "train": "MODEL_TRAINED", "evaluate": "EVAL_COMPLETED"}
CommandOf = Callable[[Path, Stage, str], Sequence[str]]  # folder, stage, token: a command line


def stage_command(root: Path, stage: Stage, token: str) -> list[str]:
    """The command line of a real stage. It runs by hand, too."""
    module = "async_grpo_experiments.runner.stages"
    return [sys.executable, "-m", module, str(root), stage.job.id, stage.kind, token]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What lies in an experiment's folder.

    Attributes:
        done: digests of the stages whose folders hold, by name.
        redo: why a stage that was finished is not any more, by name.
        changed: how the configuration differs from that of a finished stage, by name.
    """

    done: dict[str, str]
    redo: dict[str, str]
    changed: dict[str, list[str]]


def look(root: Path, config: ExperimentConfig) -> OnDisk:
    """Verify what every stage has left. What was made of something that does not hold does not hold either."""
    graph = graph_of(config)
    done: dict[str, str] = {}
    redo: dict[str, str] = {}
    changed: dict[str, list[str]] = {}
    for name, stage in graph.items():
        try:
            manifest = states.manifest_of(root / stage.folder)
            if manifest is None:
                continue
            why = states.damage(root / stage.folder, manifest)
        except BadFileError as error:
            redo[name] = str(error)
            continue
        if lost := next((need for need in stage.needs if done.get(need) != manifest.inputs.get(need)), ""):
            why = why or f"it was made of {lost}, which is not there as it was"
        if why:
            redo[name] = why
        elif found := states.differences(manifest.keys, json.loads(json.dumps(keys_of(config, stage)))):
            changed[name] = found
        else:
            done[name] = states.digest(manifest)
    return OnDisk(done, redo, changed)


def state_of(
    job: ExperimentJob, graph: Mapping[str, Stage], done: Collection[str], records: Mapping[str, Record]
) -> str:
    """The state of a job: how far its folders hold, or why it goes no further."""
    own = [stage for stage in graph.values() if stage.job == job]
    reached = NOT_STARTED
    for stage in own:
        record = records.get(stage.name)
        if stage.name in done:
            reached = _DONE[stage.kind]
        elif record is not None and record.state == FAILED:
            return "FAILED"
        elif record is not None and record.state == BLOCKED:
            return f"BLOCKED ({record.why})"
    return reached


def run_experiment(
    root: Path,
    config: ExperimentConfig,
    *,
    places: Sequence[Place] | None = None,
    command: CommandOf = stage_command,
    open_starter: OpenStarter = ON_THIS_MACHINE,
    only: str | None = None,
) -> int:
    """Run to the end; returns 0, 1 if a stage failed, 130 if it was asked to stop.

    Args:
        command: makes the command line of a stage.
        only: a job: it runs, what it needs, and what needs it. None: all.

    Raises:
        AsyncGRPOError: nothing can be started, or the folder is not free.
    """
    survive_lost_output()
    root.parent.mkdir(parents=True, exist_ok=True)
    make_folder(root)
    with _held(root), closing(ExperimentLog(root / RUN_LOG)) as log:
        end_leftovers(read(root / LEDGER).values(), grace_s=GRACE_S, say=log.say)
        graph = graph_of(config)
        wanted = graph if only is None else around(graph, only)
        for stage in graph.values():
            states.adopt(root / stage.folder)
        found = look(root, config)
        _refuse_changes(root, found, graph)
        _move_aside(root, graph, found, log.say)
        _write_config(root, config, graph)
        with closing(Ledger(root / LEDGER)) as ledger:
            schedule = ExperimentRun(root, config, graph, found, ledger, log, wanted)
            stopped = schedule.run(_places(config) if places is None else places, command, open_starter)
            code = _code(ledger.records, graph, stopped=stopped)
            _tell(root, ledger.records, graph, code)
        try:
            write_results(root, config)
        except DiskFullError as error:
            log.say(f"the results are not complete: {error}")
        log.say(f"results: {root / 'results.md'}")
    return code


class ExperimentLog:
    """`run.log`, and standard output."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def say(self, text: str) -> None:
        print(printable(f"[experiment] {time.strftime('%H:%M:%S')} {text}"), flush=True)
        self.note(text)

    def note(self, text: str) -> None:
        """Write a line to the file alone."""
        self._file.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def close(self) -> None:
        self._file.close()


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
        wanted: Collection[str],
    ) -> None:
        self._root, self._config, self._graph, self._ledger, self._log = root, config, graph, ledger, log
        self._digests = dict(found.done)
        self._wanted = wanted
        self._memory = _Memory(root.parent.parent / MEMORY)
        self._written = ""
        self._said_idle = False

    def run(self, places: Sequence[Place], command: CommandOf, open_starter: OpenStarter) -> bool:
        """Run all that has not finished; returns whether a stop was asked for."""
        self._settle_ledger()
        tasks = [self._task(stage, command) for name, stage in self._graph.items() if name in self._wanted]
        self._places = len(places)
        screen = open_screen(lambda: self.jobs(), self._log.say)

        def look() -> None:
            screen.look()
            self._write_states()
            self._tell_idle()

        schedule = TaskSchedule(
            tasks,
            places,
            self._ledger,
            say=self._log.say if not screen.is_live else screen.say_with(self._log.note),
            look=look,
            stagger_s=self._config.scheduling.stagger_s,
            open_starter=open_starter,
        )
        left = len(self._graph) - len(self._digests)
        jobs, stages = len({stage.job for stage in self._graph.values()}), len(self._graph)
        on = ", ".join(place.name for place in places)
        self._log.say(f"{counted(jobs, 'job')}, {left} of {counted(stages, 'stage')} to run on {on}; in {self._root}")
        before = {number: signal.signal(number, schedule.stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with screen:
                schedule.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self._write_states()
        return schedule.stopping

    def jobs(self) -> Iterator[tuple[str, str, str, str]]:
        """For each job its name, its state, what runs of it where, and the seconds that its stages took."""
        records = self._ledger.records
        done = frozenset(name for name, record in records.items() if record.state == FINISHED)
        for job in dict.fromkeys(stage.job for stage in self._graph.values()):
            own = [stage for stage in self._graph.values() if stage.job == job]
            now = [stage for stage in own if records[stage.name].state == RUNNING]
            seconds = sum(records[stage.name].seconds for stage in own)
            doing = ", ".join(f"{stage.kind} on {records[stage.name].place}" for stage in now)
            yield job.id, state_of(job, self._graph, done, records), doing, f"{seconds:.0f} s"

    def _settle_ledger(self) -> None:
        """The folders say what is finished; the ledger of a killed runner may say something else."""
        for name in self._graph:
            record = self._ledger.records.get(name, Record(task=name, state=WAITING))
            state = FINISHED if name in self._digests else WAITING
            if record.state != state or name not in self._ledger.records:
                self._ledger.put(Record(task=name, state=state, seconds=record.seconds, peak_bytes=record.peak_bytes))

    def _task(self, stage: Stage, command: CommandOf) -> Task:
        config, folder = self._config, self._root / stage.folder

        def begin(place: Place) -> Command:
            inputs = {need: self._digests[need] for need in stage.needs}
            attempt = states.begin(folder, states.MadeOf(inputs=inputs, keys=keys_of(config, stage)))
            arguments = command(self._root, stage, states.token_of(attempt))
            self._log.note(f"{stage.name}: {' '.join(arguments)}")
            log = folder.parent / f"log_{stage.kind}.txt"
            return Command(arguments, place.environment(os.environ), log)

        def unfinished() -> str:
            try:
                manifest = states.manifest_of(folder)
            except BadFileError as error:
                return str(error)
            if manifest is None:
                return f"it ended without leaving {folder}"
            self._digests[stage.name] = states.digest(manifest)
            return ""

        own_priority = named(config.scheduling.priority) if config.scheduling.priority else None
        return Task(
            name=stage.name,
            command=begin,
            needs=stage.needs,
            need=Need(gpus=config.system.gpus_per_job, bytes=self._memory.needed(stage, config)),
            priority=own_priority(stage.job, config) if own_priority else chain_left(stage, self._graph, self._took()),
            deadline_s=config.scheduling.deadline_s or math.inf,
            grace_s=GRACE_S,
            unfinished=unfinished,
            peak_bytes=partial(self._memory.peak_of, stage, folder, config),
        )

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
        self._written = text
        try:
            write_json(self._root / JOB_STATES, now)
        except DiskFullError as error:
            self._log.say(f"{JOB_STATES} is not the newest: {error}")

    def _tell_idle(self) -> None:
        """Say once why places are idle."""
        if self._said_idle:
            return
        records = self._ledger.records
        running = [name for name in self._graph if records[name].state == RUNNING]
        waiting = [stage for stage in self._graph.values() if records[stage.name].state == WAITING]
        ready = [stage for stage in waiting if all(records[need].state == FINISHED for need in stage.needs)]
        idle = self._places - len(running)
        if idle > 0 and running and waiting and not ready:
            self._said_idle = True
            more = f" and {len(running) - 1} more" if len(running) > 1 else ""
            self._log.say(
                f"{idle} of {counted(self._places, 'place')} are idle: {counted(len(waiting), 'stage')} wait for "
                f"{running[0]}{more}, and no other fits. More lines, or num_samples, would use them."
            )


class _Memory:
    """The largest memory that each kind of stage has had, for all experiments of one outputs folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._peaks = {str(key): int(value) for key, value in read_object(path).items()}
        except (FileNotFoundError, BadFileError, ValueError, TypeError):
            self._peaks = {}

    def needed(self, stage: Stage, config: ExperimentConfig) -> int | None:
        """Bytes to reserve; None: unknown, so it gets its place alone."""
        peak = self._peaks.get(self._key(stage, config))
        return None if peak is None or config.system.gpus_per_job > 1 else int(peak * MARGIN)

    def peak_of(self, stage: Stage, folder: Path, config: ExperimentConfig) -> int:
        """What a stage has written of itself in `usage.json`; kept for the next one like it."""
        try:
            peak = int(read_object(folder / "usage.json")["peak_bytes"])
        except (FileNotFoundError, BadFileError, KeyError, ValueError, TypeError):
            return 0
        key = self._key(stage, config)
        if peak > self._peaks.get(key, 0):
            self._peaks[key] = peak
            write_json(self._path, self._peaks)
        return peak

    def _key(self, stage: Stage, config: ExperimentConfig) -> str:
        keys = config.algos.get(stage.job.algo, {})
        batch = f"{keys.get('batch_size')}/{config.training.micro_batch_size}/{config.generation.batch_size}"
        return f"{stage.job.algo} {stage.kind} {config.models[stage.job.family].ref} {batch}"


def _places(config: ExperimentConfig) -> list[Place]:
    """The places of this machine: a GPU each, with its memory, or one share of the cores for each job at a time."""
    system = config.system
    most = system.max_parallel_jobs if system.use_parallel_execution else 1
    gpus = 0 if system.device == "cpu" else visible_gpus()
    if gpus:
        return gpu_places(gpus, each=1, at_most=None if most is None else min(gpus, most * system.gpus_per_job))
    return core_places(most or max(1, len(os.sched_getaffinity(0)) // 2))


@contextmanager
def _held(root: Path) -> Iterator[None]:
    """One process at a time runs this experiment."""
    lock = KernelLock(root / LOCK)
    if not lock.try_acquire({"role": "experiment"}):
        raise RunDirError(
            f"{root} is in use by another runner ({describe_holder(lock.holder())}). Wait for it, or stop it."
        )
    try:
        yield
    finally:
        lock.release()


def _refuse_changes(root: Path, found: OnDisk, graph: Mapping[str, Stage]) -> None:
    if not found.changed:
        return
    name, first = next(iter(found.changed.items()))
    jobs = sorted({graph[one].job.id for one in below(graph, found.changed)})
    raise UsageError(
        f"{name} is finished, and was made with other keys ({'; '.join(first)}). This touches {', '.join(jobs)}. Give "
        f"the same values, start another experiment, or delete the folders of these jobs in {root / 'jobs'}."
    )


def _move_aside(root: Path, graph: Mapping[str, Stage], found: OnDisk, say: Callable[[str], None]) -> None:
    """Make room for what is made again, and say what and why."""
    for name, why in found.redo.items():
        say(f"{name} is made again: {why}. What was there is in {states.move_aside(root / graph[name].folder)}.")


def _write_config(root: Path, config: ExperimentConfig, graph: Mapping[str, Stage]) -> None:
    """The whole configuration, and that of each job."""
    tree = as_json(config)
    _write_yaml(root / CONFIG, tree)
    for job in {stage.job for stage in graph.values()}:
        folder = root / "jobs" / job.id
        folder.mkdir(parents=True, exist_ok=True)
        own = {**tree, "algos": {job.algo: tree["algos"].get(job.algo, {})}}
        _write_yaml(folder / CONFIG, {"job": asdict(job), **own})


def _write_yaml(path: Path, tree: Mapping[str, Any]) -> None:
    write_lines(path, yaml.safe_dump(dict(tree), sort_keys=False).splitlines())


def changed(root: Path, overrides: Sequence[str]) -> ExperimentConfig:
    """The configuration of an experiment with some keys changed, `a.b=c`."""
    tree: dict[str, Any] = as_json(config_of(root))
    for override in overrides:
        key, equals, text = override.partition("=")
        *above, last = key.split(".")
        if not equals or not key or key[0] in "+~":
            raise UsageError(
                f"{override}: a resumed experiment has the keys that it was begun with; change one: KEY=VALUE."
            )
        part = tree
        for name in above:
            part = part.setdefault(name, {})
        part[last] = yaml.safe_load(text)
    return checked(tree)


def check_stages(config: ExperimentConfig) -> None:
    """Have a child with torch read the keys of the algorithms and the datasets. `UsageError` with what it says."""
    command = [sys.executable, "-m", "async_grpo_experiments.runner.stages", "check"]
    found = subprocess.run(command, input=json.dumps(as_json(config)), text=True, capture_output=True, check=False)
    if found.returncode:
        raise UsageError(last_line(found.stderr).removeprefix("error: "))


def config_of(root: Path) -> ExperimentConfig:
    """The configuration that an experiment was last started with. `UsageError`: there is no experiment."""
    try:
        return checked(yaml.safe_load(bytes(read_file(root / CONFIG)).decode()))
    except FileNotFoundError:
        raise UsageError(f"{root} holds no experiment: it has no {CONFIG}.") from None


def _code(records: Mapping[str, Record], graph: Mapping[str, Stage], *, stopped: bool) -> int:
    ended = {records[name].state for name in graph}
    if FAILED in ended or BLOCKED in ended:
        return 1
    return STOPPED_CODE if stopped and ended & {STOPPED, WAITING} else 0


def _tell(root: Path, records: Mapping[str, Record], graph: Mapping[str, Stage], code: int) -> None:
    for name in graph:
        if (record := records[name]).state == FAILED:
            print(printable(f"[experiment] {name} failed ({record.why}). Its last words:"), file=sys.stderr)
            print(printable(record.last_words or record.why), file=sys.stderr)
    if code:
        print(f"continue: {program()} experiment resume_from={root}", flush=True)
