"""What a sweep is, and what each of its runs gets: names, folders, ports. Nothing is shared that can clash."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from async_grpo.errors import BadFileError, RunDirError, UsageError
from async_grpo.rundir.files import write_json
from async_grpo.rundir.folders import check_folder
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.shape import as_json, shaped
from async_grpo.settings import SEEDS, TrainingSettings, WorkerSettings
from async_grpo_experiments.slots.places import Place

ASYNC, TRL = "async", "trl"
DEFAULT_SEEDS = (42, 1337, 2024, 9999)
DEFAULT_OUTPUTS = "outputs"
BASE_PORT = 8000
STAGGER_S = 5.0  # loading needs most memory
GROUP_PORTS_ABOVE = 43200  # the first group port less the base port
GROUP_PORTS_APART = 100
MAX_PORT = 65535
OWN_SETTINGS = ("seed", "set", "run_name", "run_group", "run_tags", "delta_dir")  # of each run


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What the command line decides. `sweep.json` keeps it for `--resume`."""

    setup: str  # the setup file, absolute
    seeds: tuple[int, ...]
    mode: str = ASYNC
    name: str  # of the data, in the names of folders
    dataset: str | None = None  # what `DATASET` is set to for the setup file
    output_base: str = DEFAULT_OUTPUTS
    logs: str = ""  # a folder; empty: beside a folder called `outputs`, or below any other
    kept: str = ""  # the folder of kept versions, as `logs`
    stagger_s: float = STAGGER_S  # between the starts of two runs
    run_prefix: str = ""
    start_instance: int = 0
    base_port: int = BASE_PORT
    gpus_per_run: int | None = None  # None: one where there are GPUs
    num_instances: int | None = None  # runs at once; None: as many as fit
    num_workers: int | None = None  # of each run; None: as many as `train` has
    training: TrainingSettings = field(default_factory=TrainingSettings)  # what the runs have in common
    work: WorkerSettings = field(default_factory=WorkerSettings)
    given: tuple[str, ...] = ()  # names of the settings that were chosen; `train` has its own defaults

    @property
    def folder(self) -> Path:
        """Where the sweep keeps what it knows, next to the folders of its runs."""
        start = f"_instance{self.start_instance}" if self.start_instance else ""
        return Path(self.output_base) / f"{self.prefix}sweep_{self.name}{start}"

    @property
    def prefix(self) -> str:
        return f"{self.run_prefix}_" if self.run_prefix else ""

    @property
    def log_folder(self) -> Path:
        """`logs/parallel_training`, or the same below another `--output-base`."""
        return Path(self.logs) if self.logs else self._beside("logs") / "parallel_training"

    @property
    def kept_folder(self) -> Path:
        """`checkpoints`, or the same below another `--output-base`."""
        return Path(self.kept) if self.kept else self._beside("checkpoints")

    def _beside(self, name: str) -> Path:
        base = Path(self.output_base)
        return (base.parent if base.name == DEFAULT_OUTPUTS else base) / name

    @property
    def runs(self) -> list[Run]:
        return [Run(self, self.start_instance + index, seed) for index, seed in enumerate(self.seeds)]


@dataclass(frozen=True, slots=True)
class Run:
    """One seed of the sweep. An instance number is never used twice in one sweep."""

    sweep: Sweep
    instance: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.sweep.prefix}trl_{self.sweep.name}_instance{self.instance}_seed{self.seed}"

    @property
    def output(self) -> Path:
        """Its folder: checkpoints, and below it the run directory and the caches."""
        return Path(self.sweep.output_base).absolute() / self.name

    @property
    def run_dir(self) -> Path:
        return self.output / "run"

    @property
    def caches(self) -> Path:
        return self.output / "cache"

    def training(self, model: str = "") -> TrainingSettings:
        """The settings of the sweep with those that are the run's own. `model` is in its name for W&B and trackio."""
        sweep = self.sweep
        called = re.sub(r"[^a-z0-9.]+", "-", Path(model).name.lower()).strip("-")
        data = f"{sweep.name}_grpo_{called}" if called else sweep.name
        kept = sweep.kept_folder.absolute() / self.name.replace("trl_", "deltas_", 1)  # a chain is one run's
        return replace(
            sweep.training,
            seed=self.seed,
            set={"output_dir": str(self.output), **(sweep.training.set or {})},
            run_name=f"{sweep.prefix}trl_{data}_instance{self.instance}_seed{self.seed}",
            run_group=sweep.folder.name,
            run_tags=(sweep.name, sweep.mode, f"seed{self.seed}"),
            delta_dir=str(kept) if sweep.training.delta_every else None,
        )

    def training_log(self, place: Place) -> Path:
        where = f"gpu{'-'.join(place.gpus)}" if place.gpus else "cpu"
        return self._log(f"training_instance{self.instance}_{where}_seed{self.seed}.log")

    def server_log(self, place: Place) -> Path:
        where = f"gpu{place.gpus[-1]}" if place.gpus else "cpu"
        return self._log(f"vllm_instance{self.instance}_{where}_seed{self.seed}.log")

    def _log(self, name: str) -> Path:
        return (self.sweep.log_folder / f"{self.sweep.prefix}{name}").absolute()

    def port_pairs(self) -> list[tuple[int, int]]:
        """A server's port and its group port: the run's own, then those that no other run of the sweep has."""
        group = self.sweep.base_port + GROUP_PORTS_ABOVE
        last = self.sweep.start_instance + len(self.sweep.seeds)
        spare = range(last + self.instance, MAX_PORT, len(self.sweep.seeds))
        pairs = [(self.sweep.base_port + k, group + GROUP_PORTS_APART * k) for k in (self.instance, *spare)]
        return [pair for pair in pairs if max(pair) <= MAX_PORT]


def check(sweep: Sweep) -> None:
    """Refuse what cannot be run. `UsageError` says why."""
    if not sweep.seeds:
        raise UsageError("A sweep needs at least one seed: --seeds 42,1337,2024,9999.")
    if twice := sorted({seed for seed in sweep.seeds if sweep.seeds.count(seed) > 1}):
        raise UsageError(
            f"--seeds has {', '.join(map(str, twice))} twice. A seed that is counted twice would make the interval too "
            "narrow. Give each seed once."
        )
    if not all(run.port_pairs() for run in sweep.runs):
        raise UsageError(
            f"--base-port {sweep.base_port} leaves no port below {MAX_PORT} for instance {sweep.runs[-1].instance}: an "
            f"instance i takes {sweep.base_port} + i and {sweep.base_port + GROUP_PORTS_ABOVE} + 100 i. Choose a "
            "lower one."
        )
    sweep.runs[0].training().check()


def name_of(setup: Path, dataset: str | None) -> str:
    """`gsm8k`, or what of the setup file's name is its own: `trainer_setup_tiny.py` is `tiny`."""
    return dataset or setup.stem.removeprefix("trainer_setup_") or "runs"


def write(sweep: Sweep) -> None:
    """Keep the sweep, so that it can be continued from any folder, and compared after it was moved."""
    logs, versions, outputs = (
        str(path.absolute()) for path in (sweep.log_folder, sweep.kept_folder, Path(sweep.output_base))
    )
    kept = replace(sweep, logs=logs, kept=versions, output_base=outputs)
    write_json(sweep.folder / "sweep.json", as_json(kept))


def load(folder: Path) -> Sweep:
    """The sweep that has this folder. `RunDirError` if there is none."""
    try:
        kept = shaped(Sweep, read_object(folder / "sweep.json"))
        if wrong := [seed for seed in kept.seeds if seed not in SEEDS]:
            raise BadFileError(f"{wrong[0]} is no seed: one is from 0 to 2^32 - 1")
        return replace(kept, output_base=str(folder.parent))
    except FileNotFoundError as error:
        raise RunDirError(_no_sweep(folder)) from error
    except BadFileError as error:
        raise RunDirError(f"{folder / 'sweep.json'} is not the record of a sweep ({error}).") from error


def own(folder: Path) -> Sweep:
    """The sweep that this user began in this folder, to be continued: its record says what is executed.

    Raises:
        RunDirError: there is none, another user could have written it, or the folder was renamed.
    """
    check_folder(folder)
    found = load(folder)
    if found.folder.absolute() != folder.absolute():
        raise RunDirError(
            f"{folder} holds the record of a sweep whose folder is called {found.folder.name}: it was renamed, or "
            f"copied from elsewhere. A sweep goes on under its own name, beside its runs: rename it to {found.folder}, "
            "then continue."
        )
    return found


def find(folder: Path) -> Path:
    """The folder of the sweep in `folder`, or of the only one below it. `RunDirError` if there is none, or several."""
    if (folder / "sweep.json").exists():
        return folder.resolve() if folder.name in ("", "..") else folder  # `.` and `..` are no names to compare
    found = sorted(path.parent for path in folder.glob("*/sweep.json"))
    if len(found) == 1:
        return found[0]
    if found:
        raise RunDirError(f"{folder} holds {len(found)} sweeps ({', '.join(map(str, found))}); name one.")
    raise RunDirError(_no_sweep(folder))


def _no_sweep(folder: Path) -> str:
    what = "holds no sweep: there is no sweep.json in it" if folder.is_dir() else "does not exist"
    return f"{folder} {what}. Name the folder that a sweep wrote, as it is called now."
