"""One GPU against its own limits: a worker alone, a training step, TRL alone, a server with workers.

    python benchmarks/one_gpu.py [--device 0|cpu] [--shape 0.6B|tiny] [--limit SECONDS] [--json FILE] [--only NAME]

The card's copy and product come first. From them and the model's sizes follow the least times (benchmarks/roofline.py)
that every row is held against. A row is a process of its own, which is ended when its time is up: what it had logged
until then counts, and the other rows go on. The most important rows come first; the JSON is written after each.

Weights are random. A completion ends by itself once in as many tokens as the vocabulary has, so nearly all are as long
as they may be; those that were sampled are counted. Where prompts or completions are unequal, they have from a quarter
of the tokens up to all. "GPU busy" is how long any kernel ran, as nvidia-smi has it, between the steps that count.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.roofline import Card, Model, decoding_s, evenly, training_s
from benchmarks.table import ROOT, Row, describe_machine, figure, machine_line, row, write_json

from async_grpo.checks.doctor.gpu import mps_processes

WORK = [sys.executable, str(ROOT / "benchmarks" / "one_gpu_work.py")]
SETUP = str(ROOT / "benchmarks" / "setups" / "qwen3_shape.py")
CLI = [sys.executable, "-m", "async_grpo.cli"]
MPS_CONTROL = "nvidia-cuda-mps-control"
TRL = "TRL with generate"
COLUMNS = ("rollouts/s", "tokens/s", "of the limit", "x TRL", "GPU busy")
SAMPLE_S = 1.0
SHORTEST_S = 15.0  # a row needs as long to import what it needs
ENDING_S = 10.0  # that a process is given to end by itself
NO_FIGURES = "On a CPU, with tiny sizes: no figure here means anything for a GPU."


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The sizes of what is measured."""

    shape: str
    prompt: int  # tokens
    completion: int  # tokens
    groups: int  # prompts of a batch
    large: int  # completions of a batch
    small: int
    micro_batch: int


SETTINGS = {
    "0.6B": Setting(shape="0.6B", prompt=128, completion=256, groups=8, large=512, small=64, micro_batch=32),
    "tiny": Setting(shape="tiny", prompt=16, completion=8, groups=4, large=16, small=8, micro_batch=2),
}

Least = Callable[[Model, Card], float]  # seconds of a step, at the limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table: a process that logs its steps, and what these are held against."""

    name: str
    command: list[str]
    steps: int
    rollouts: int = 0  # of a step
    least_s: Least = lambda model, card: 0.0
    env: dict[str, str] = field(default_factory=dict)
    prompt: int = 0  # tokens of each rollout that the log counts besides its completion
    target: str = ""  # of the limit
    target_trl: str = ""  # of TRL's rollouts a second
    mps: bool = False
    row_limits: float = 1.0  # times as long as the others
    left_out: str = ""


# --- The rows ---------------------------------------------------------------------------------------------


def card_itself(setting: Setting, device: str) -> Case:
    return Case(name="the card's own limits", command=[*WORK, "card"], steps=1, env=sizes(setting, 8, device))


def cases(setting: Setting, device: str) -> list[Case]:
    """All rows, the most important first."""
    workers = [
        Case(
            name=f"worker alone, {rows} rows, {kind} prompts",
            command=[*WORK, "worker"],
            steps=5,
            rollouts=rows,
            least_s=decoding(setting, prompts, rows),
            env=sizes(setting, rows, device) | {"PROMPTS": listed(prompts)},
            target=target,
        )
        for kind, prompts in (
            ("equal", [setting.prompt] * setting.groups),
            ("unequal", evenly(setting.prompt, setting.groups)),
        )
        for rows, target in ((setting.large, ">= 0.5"), (setting.small, ">= 0.35"))
    ]
    passes = [one_pass(setting, device, "without", "none"), one_pass(setting, device, "with", "trl")]
    trl = whole_steps(setting, TRL, [*WORK, "trl"], env=sizes(setting, setting.large, device), row_limits=2.0)
    batching = replace(
        trl,
        name="TRL with its continuous batching",
        env=trl.env | {"CONTINUOUS_BATCHING": "1"},
        row_limits=1.0,
        left_out="it takes a minute on a CPU" if device == "cpu" else "",
    )
    large, small, *unequal = workers
    env = small.env | {"WITHOUT_GRAPHS": "1"}
    growing = replace(small, name=f"without CUDA graphs: {small.name}", env=env, target="")
    one, two, four = (served(setting, device, workers) for workers in (1, 2, 4))
    plain: dict[str, Any] = {"target": "", "target_trl": "", "row_limits": 1.0}
    mps_one, mps_share, mps_two, mps_four = (
        replace(case, name=f"MPS: {case.name}", mps=True, left_out=why_no_mps(device), **plain)
        for case in (one, sharing(setting, device, 50), two, four)
    )
    shared = [two, four, mps_one, mps_two, mps_share]
    return [large, trl, one, small, *shared, growing, *passes, *unequal, batching, mps_four]


def sizes(setting: Setting, rows: int, device: str) -> dict[str, str]:
    """The environment of a process of ours; on a GPU it sees that one alone."""
    numbers = {"PROMPT": setting.prompt, "COMPLETION": setting.completion, "ROWS": rows}
    numbers |= {"GROUP": rows // setting.groups, "MICRO_BATCH": min(rows, setting.micro_batch)}
    texts = {"CUDA_VISIBLE_DEVICES": "" if device == "cpu" else device, "HF_HUB_OFFLINE": "1"}
    attention = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
    texts[attention] = os.environ.get(attention, "1")  # as in our roles; `generate` has a new shape at each token
    return {"QWEN3_SHAPE": setting.shape, **texts, **{name: str(number) for name, number in numbers.items()}}


def decoding(setting: Setting, prompts: Sequence[int], rows: int, *, shared_by: int = 1) -> Least:
    each = list(prompts) * (rows // len(prompts))
    return lambda model, card: decoding_s(model, card, each, setting.completion, shared_by=shared_by)


def training(setting: Setting) -> Least:
    lengths = [setting.prompt] * setting.large, [setting.completion] * setting.large
    return lambda model, card: training_s(model, card, *lengths)


def limits(setting: Setting) -> dict[str, Least]:
    """The least times of this setting, whether or not a row is held against them."""
    prompt, large, small = [setting.prompt], setting.large, setting.small
    return {
        f"decoding, {large} rows": decoding(setting, prompt, large),
        f"decoding, {small} rows": decoding(setting, prompt, small),
        f"decoding, {large} rows, prompts read once": decoding(
            setting, prompt, large, shared_by=large // setting.groups
        ),
        f"a training step, {large} rows": training(setting),
    }


def one_pass(setting: Setting, device: str, padding: str, value: str) -> Case:
    """A forward and a backward pass over prompts and completions of unequal lengths."""
    prompts, completions = (evenly(most, setting.micro_batch) for most in (setting.prompt, setting.completion))
    return Case(
        name=f"forward and backward, {padding} padding",
        command=[*WORK, "training"],
        steps=12,
        rollouts=setting.micro_batch,
        least_s=lambda model, card: training_s(model, card, prompts, completions),
        env={
            **sizes(setting, setting.micro_batch, device),
            "PROMPTS": listed(prompts),
            "COMPLETIONS": listed(completions),
            "PADDING": value,
        },
    )


def listed(lengths: Sequence[int]) -> str:
    return ",".join(map(str, lengths))


def whole_steps(setting: Setting, name: str, command: list[str], **more: Any) -> Case:
    """Optimizer steps, each with as many new rollouts, against decoding and then training at the limits."""
    decode_s, train_s = decoding(setting, [setting.prompt], setting.large), training(setting)
    return Case(
        name=name,
        command=command,
        steps=6,
        rollouts=setting.large,
        least_s=lambda model, card: decode_s(model, card) + train_s(model, card),
        prompt=setting.prompt,
        **more,
    )


def served(setting: Setting, device: str, workers: int) -> Case:
    run = [*CLI, "train", SETUP, "--master-device-id", device, "--generator", "hf", "--max-staleness", "1"]
    one = workers == 1
    return whole_steps(
        setting,
        f"server and {workers} worker{'' if one else 's'}",
        [*run, "--worker-device-ids", ",".join([device] * workers)],
        env=served_env(setting, device),
        target=">= 0.35" if one else "",
        target_trl=">= 3" if one else "",
        row_limits=2.0 if one else 1.0,
    )


def sharing(setting: Setting, device: str, percent: int) -> Case:
    """The worker has a share of the GPU's SMs, which MPS takes from its environment.

    The launcher gives all processes one environment, so a shell starts both.
    """
    worker = shlex.join([*CLI, "worker", "--device", device, "--generator", "hf"])
    server = shlex.join([*CLI, "server", "--config", SETUP, "--device", device, "--max-staleness", "1"])
    script = f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percent} {worker} & exec {server}"
    name = f"server and 1 worker, which has {percent}% of the SMs"
    return whole_steps(setting, name, ["sh", "-c", script], env=served_env(setting, device))


def served_env(setting: Setting, device: str) -> dict[str, str]:
    env = sizes(setting, setting.large, device)
    if device != "cpu":  # roles choose among all GPUs
        del env["CUDA_VISIBLE_DEVICES"]
    return env | {"STEPS": "1000"}  # it is ended: towards its last step the workers would have nothing to do


# --- Running one ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What was seen of a row's process."""

    lines: list[dict[str, Any]] = field(default_factory=list)  # of its log
    busy: list[tuple[float, float]] = field(default_factory=list)  # when, and how much of the time a kernel ran
    failure: str = ""
    note: str = ""


def run(case: Case, device: str, limit_s: float) -> Ran:
    """Run the process, at most so long."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        mps = held.enter_context(mps_daemon(folder)) if case.mps else {}
        log, output = folder / "steps.jsonl", folder / "output.txt"
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}  # rows set theirs
        env |= {"STEPS": str(case.steps), **case.env, **mps, "PYTHONPATH": path, "STEP_LOG": str(log)}
        with output.open("wb") as file:
            process = subprocess.Popen(
                case.command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                busy = watch(process, device, limit_s, lambda: len(logged(log)) >= case.steps)
                code = process.poll()
            finally:
                end(process)
        lines = logged(log)
        said = (output.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    if code:
        return Ran(failure=f"exit code {code}: {said}")
    cut = f"{len(lines)} of {case.steps} steps in its {limit_s:.0f} s" if len(lines) < case.steps else ""
    return Ran(lines=lines, busy=busy, note=cut, failure=f"{cut}: {said}" if cut and len(lines) < 2 else "")


def logged(log: Path) -> list[dict[str, Any]]:
    """The whole lines of a log that may be written to."""
    whole, _, _ = log.read_text().rpartition("\n") if log.exists() else ("", "", "")
    return [json.loads(line) for line in whole.splitlines()]


def watch(
    process: subprocess.Popen[bytes], device: str, limit_s: float, done: Callable[[], bool]
) -> list[tuple[float, float]]:
    """Wait until the process has done its steps, at most so long, and see how busy the GPU is."""
    busy, deadline = [], time.monotonic() + limit_s
    while (left := deadline - time.monotonic()) > 0 and not done():
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(SAMPLE_S, left))
            break
        if device != "cpu" and (share := busy_share(device)) is not None:
            busy.append((time.time(), share))
    return busy


def busy_share(device: str) -> float | None:
    query = ["nvidia-smi", "-i", device, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    with suppress(FileNotFoundError, subprocess.TimeoutExpired):
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
        if answer.isdecimal():
            return int(answer) / 100
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started; what is in a session of its own is known before its parent is gone."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, ENDING_S)  # the next row needs their memory


def why_no_mps(device: str) -> str:
    if device == "cpu" or shutil.which(MPS_CONTROL) is None:
        return "no MPS here"
    return "an MPS daemon runs already" if mps_processes() else ""


@contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """Run an MPS daemon with its own folders, and give the environment that leads to it."""
    folders = {"CUDA_MPS_PIPE_DIRECTORY": folder / "pipe", "CUDA_MPS_LOG_DIRECTORY": folder / "log"}
    for path in folders.values():
        path.mkdir()
    lead = {name: str(path) for name, path in folders.items()}
    pid_file = folder / "pipe" / f"{MPS_CONTROL}.pid"
    try:
        if why := control(["-d"], folder / "said.txt", lead):
            raise ChildProcessError(f"the MPS daemon did not start: {why}")
        yield lead
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            control([], folder / "said.txt", lead, "quit\n")
        with suppress(OSError, ValueError, psutil.NoSuchProcess):  # it has ended
            daemon = psutil.Process(int(pid_file.read_text()))
            if daemon in mps_processes():
                for process in [*daemon.children(recursive=True), daemon]:
                    process.kill()


def control(arguments: list[str], said: Path, lead: dict[str, str], told: str = "") -> str:
    """Why it failed; empty: it did not. What it says goes into a file: a daemon may keep a pipe open."""
    with said.open("w") as file:
        ran = subprocess.run(
            [MPS_CONTROL, *arguments],
            env=os.environ | lead,
            input=told,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=20,
            check=False,
        )
    last = (said.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    return f"exit code {ran.returncode}: {last}" if ran.returncode else ""


# --- The table --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """What was measured so far."""

    options: argparse.Namespace
    setting: Setting
    deadline: float
    rows: list[Row] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)  # to a row, or why it has no figures
    limits: tuple[Model, Card] | None = None
    card: str = "The card was not measured, so nothing is held against its limits."

    def measure(self, case: Case) -> None:
        """Run the row, if there is time for it, and add its figures or the reason why it has none."""
        left_s, row_s = self.deadline - time.monotonic(), case.row_limits * self.options.row_limit
        if case.left_out or left_s < min(SHORTEST_S, row_s):
            self.notes[case.name] = f"left out: {case.left_out or 'the time for all rows was over'}"
            return
        try:
            ran = run(case, self.options.device, min(row_s, left_s))
        except ChildProcessError as error:
            self.notes[case.name] = f"left out: {error}"
            return
        except (OSError, subprocess.SubprocessError) as error:
            ran = Ran(failure=str(error))
        if ran.failure or ran.note:
            self.notes[case.name] = f"failed: {ran.failure}" if ran.failure else ran.note
        if ran.failure:
            return
        if case.rollouts:
            self.rows += self._figures(case, ran)
        else:
            said = ran.lines[0]
            self.card, self.limits = said["name"], (Model(**said["model"]), Card(**said["card"]))

    def _figures(self, case: Case, ran: Ran) -> Iterator[Row]:
        """Speed over all steps that count, with that of the slowest and of the fastest one."""
        counted = ran.lines[1:] if len(ran.lines) > 3 else ran.lines  # the first step ends what warms up, or two do
        first, last = counted[0], counted[-1]
        seconds, steps = last["time"] - first["time"], last["step"] - first["step"]
        each = [case.rollouts / (after["time"] - before["time"]) for before, after in pairwise(counted)]
        speed, judged = steps * case.rollouts / seconds, self.options.device != "cpu"

        def rated(unit: str, share: float, target: str = "", **more: Any) -> Row:
            spread = (min(each) * share, speed * share, max(each) * share)
            one = row(case.name, [speed * share], unit, target=target if judged else "", **more)
            return replace(one, spread=spread)

        yield rated("rollouts/s", 1.0)
        tokens = last["tokens"] - first["tokens"] - steps * case.rollouts * case.prompt
        yield row(case.name, [tokens / seconds], "tokens/s")
        if self.limits:
            yield rated("of the limit", case.least_s(*self.limits) / case.rollouts, case.target, limit=1.0)
        if case.prompt and case.name != TRL and (trl := self.value(TRL, "rollouts/s")):
            yield rated("x TRL", 1 / trl, case.target_trl)
        if shares := [share for when, share in ran.busy if first["time"] <= when <= last["time"]]:
            yield row(case.name, [statistics.mean(shares)], "GPU busy")

    def value(self, name: str, unit: str) -> float | None:
        return next((one.value for one in self.rows if (one.name, one.unit) == (name, unit)), None)

    def about_the_card(self) -> str:
        """Its limits, and the least times that follow from them."""
        if self.limits is None:
            return "\n".join([self.card, *self.notes.values()])
        model, card = self.limits
        self.rows += [
            row("memory traffic of a copy", [card.bytes_s / 1e9], "GB/s"),
            row("product of matrices, in the model's number format", [card.flops_s / 1e12], "TFLOP/s"),
            *(row(f"limit: {name}", [1e3 * least(model, card)], "ms") for name, least in limits(self.setting).items()),
        ]
        return "\n".join([self.card, *(f"{one.name}: {figure(one.value)} {one.unit}" for one in self.rows)])

    def line(self, case: Case) -> str:
        """The row of the table."""
        found = {one.unit: one for one in self.rows if one.name == case.name}
        cells = [shown(found[unit]) if unit in found else "-" for unit in COLUMNS]
        return f"| {' | '.join([case.name, *cells, self.notes.get(case.name, '')])} |"

    def write(self) -> None:
        """Replace the JSON as a whole: the machine may be taken away at any time."""
        if path := self.options.json:
            part = path.with_name(f".{path.name}.part")
            write_json(part, self.rows, card=self.card, setting=asdict(self.setting), notes=self.notes)
            part.replace(path)


def shown(one: Row) -> str:
    if one.unmeasurable:
        return f"not measurable: {one.unmeasurable}"
    text, low, high = map(figure, (one.value, one.spread[0], one.spread[2]))
    if one.unit == "rollouts/s" and low != high:
        text += f" ({low} to {high})"
    return f"{text} ({one.target}: {'yes' if one.ok else 'no'})" if one.target else text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="0", help="index of the GPU on this machine, or cpu")
    parser.add_argument("--shape", choices=SETTINGS, default="0.6B")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all rows")
    parser.add_argument("--row-limit", type=float, default=60.0, help="seconds for each row")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="rows whose names begin so")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    setting, device = SETTINGS[options.shape], options.device
    chosen = [case for case in cases(setting, device) if case.name.startswith(tuple(options.only))]
    report = Report(options, setting, time.monotonic() + options.limit)
    print(machine_line(describe_machine()), *([NO_FIGURES] if device == "cpu" else []), sep="\n", flush=True)
    report.measure(card_itself(setting, device))
    print(report.about_the_card(), "", sep="\n")
    print(f"| what | {' | '.join(COLUMNS)} | note |\n|{'---|' * (2 + len(COLUMNS))}", flush=True)
    for case in chosen:
        report.measure(case)
        report.write()
        print(report.line(case), flush=True)
    return 1 if any(note.startswith("failed") for note in report.notes.values()) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a row does not outlive this process
    sys.exit(main())
