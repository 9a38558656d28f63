"""`async-grpo queue RUN_DIR ...`: look at a run's queue and repair it by hand; safe on a live run."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from async_grpo.cli import options
from async_grpo.errors import BadFileError, UsageError
from async_grpo.formatting import as_text, counted, for_people, printable
from async_grpo.queue import quarantined, retry_given_up
from async_grpo.queue.codec import decode_group, decode_job
from async_grpo.queue.filesystem import OsFiles
from async_grpo.queue.listing import open_jobs, why_set_aside
from async_grpo.queue.liveness import live_workers
from async_grpo.queue.names import FAILED, PROCESSING, reason_name, shard
from async_grpo.records import Job, RolloutGroup
from async_grpo.rundir.locks import server_alive
from async_grpo.rundir.paths import RunDir

EXAMPLES = """\
  async-grpo queue worker ls             open jobs, oldest first
  async-grpo queue worker show 42        prompt, completions and rewards of group 42, wherever it is
  async-grpo queue worker quarantine     what was set aside, and why
  async-grpo queue worker requeue 43     try failed group 43 once more"""

_ID = re.compile(r"([0-9]{1,10})(\.a[0-9]{2,3}_\w+(\.safetensors|\.reason)?)?")


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser("queue", "Look at a run's queue and repair it by hand. Safe on a live run.", EXAMPLES)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="e.g. worker/")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|show|requeue|quarantine")
    actions.add_parser("ls", help="open jobs, one a line")
    for name, text in (("show", "one job or group, readably"), ("requeue", "try a failed group once more")):
        action = actions.add_parser(name, help=text)
        action.add_argument("id", type=group_number, metavar="ID", help="sequence number, or a file name with it")
    actions.add_parser("quarantine", help="what was set aside, with the reasons")
    return parser


def group_number(text: str) -> int:
    """`42`, `0000000042` or a file name that begins so."""
    match = _ID.fullmatch(text.rpartition("/")[2])
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a group's number or one of its file names, got {text!r}")
    return int(match[1])


def run(args: argparse.Namespace) -> int:
    root: Path = args.run_dir
    if not (root / "queue").is_dir() or RunDir(root).read_state() is None:
        raise UsageError(f"{root} is not a run directory: it has no queue or no run.json. Give one, such as worker/.")
    actions: dict[str, Callable[[], Iterator[str]]] = {
        "ls": lambda: _ls(root),
        "show": lambda: _show(root, args.id),
        "requeue": lambda: _requeue(root, args.id),
        "quarantine": lambda: _quarantine(root),
    }
    for line in actions[args.action]():
        print(line)
    return 0


def _ls(root: Path) -> Iterator[str]:
    names = open_jobs(root)
    alive = {worker.name for worker in live_workers(root)}
    yield f"{'group':>10}  try  {'state':<11}{'worker':<18}file changed"
    for name in names:
        dead = "" if name.state != PROCESSING or name.worker in alive else ", not alive"
        worker = f"{name.worker}{dead}" if name.worker else "-"
        yield f"{name.seq:>10}  {name.attempt + 1:>3}  {name.state:<11}{worker:<18}{_age(root / 'queue' / str(name))}"
    yield f"{len(names)} open"


def _age(path: Path) -> str:
    """How long ago the file changed its name, by the wall clock: a hint for people, nothing relies on it."""
    try:
        seconds = time.time() - path.stat(follow_symlinks=False).st_ctime
    except FileNotFoundError:
        return "just now: it was moved on"
    if seconds < 0:
        return "in the future, says the clock"
    return f"{for_people(seconds)} ago"


def _quarantine(root: Path) -> Iterator[str]:
    entries = quarantined(root)
    for entry in entries:
        what = "given up" if entry.kind == FAILED else "unusable file; its job was issued again"
        yield f"group {entry.seq}, try {entry.attempt + 1}: {what} ({entry.name})"
        yield from _indented(entry.reason.strip())
    yield f"{len(entries)} set aside"


def _requeue(root: Path, seq: int) -> Iterator[str]:
    run = RunDir(root)
    if not server_alive(run.root):
        raise UsageError(
            f"No parameter server is alive in {run.root}, so nothing would wait for the result. Continue the "
            "run (--resume): what was given up after its last checkpoint gets one more try by that alone."
        )
    if not retry_given_up(root, seq):
        given_up = sorted({entry.seq for entry in quarantined(root) if entry.kind == FAILED})
        raise UsageError(f"Group {seq} was not given up. Given up: {', '.join(map(str, given_up)) or 'none'}.")
    yield (
        f"Group {seq} is pending again, for one more try. If it was given up before the run was last resumed, another "
        "prompt has its place, and its result will be archived unused."
    )


def _show(root: Path, seq: int) -> Iterator[str]:
    """Every file of a group. It may move meanwhile, so what is gone is looked for again."""
    for _ in range(3):
        found = [line for path in _files_of(root, seq) for line in _show_file(root, path)]
        if found:
            yield from found
            return
        time.sleep(0.05)
    raise UsageError(f"{root} has no file of group {seq}: it was never issued, or it was used and trimmed.")


def _files_of(root: Path, seq: int) -> Iterator[Path]:
    for folder in ("queue", shard(seq), "quarantine"):
        yield from sorted((root / folder).glob(f"{seq:010d}.a*.safetensors"))


def _show_file(root: Path, path: Path) -> Iterator[str]:
    relative = str(path.relative_to(root))
    with closing(OsFiles(root)) as files:
        try:
            data = files.read(relative)
            yield f"{relative}, {len(data):,} bytes, changed {_age(path)}"
            finished = "_complete_from_" in path.name or "_duplicate_from_" in path.name
            text = _group_text(decode_group(data)) if finished else _job_text(decode_job(data))
            yield from _indented("\n".join(text))
        except FileNotFoundError:
            return
        except BadFileError as error:
            yield f"{relative} cannot be used: {error}"
        if path.parent.name == "quarantine" and path.with_name(reason_name(path.name)).exists():
            yield "set aside because:"
            yield from _indented(why_set_aside(files, path.name).strip())


def _job_text(job: Job) -> Iterator[str]:
    yield (
        f"{counted(job.num_generations, 'completion')}, seed {job.seed}; issued at version {job.born_version}, "
        f"for weights of version {job.min_version} or newer"
    )
    for column, value in job.row.items():
        yield f"{column}: {as_text(value)}"


def _group_text(group: RolloutGroup) -> Iterator[str]:
    yield from _job_text(group.job)
    spent = group.timings
    yield (
        f"generated by {group.worker} with version {group.policy_version}, try {group.attempt + 1}: weights "
        f"{spent.adopt_s:.3f} s, sampling {spent.generate_s:.3f} s, rewards {spent.score_s:.3f} s"
    )
    for index, prompt in enumerate(group.prompts):
        yield f"prompt as sampled{f', of completion {index + 1}' if len(group.prompts) > 1 else ''}: {as_text(prompt)}"
    for index, completion in enumerate(group.completions):
        rewards = ", ".join(
            f"{name} {reward:g}" for name, reward in zip(group.reward_names, group.rewards[index].tolist(), strict=True)
        )
        yield f"--- completion {index + 1}: {counted(group.completion_lengths[index], 'token')}; {rewards}"
        yield as_text(completion)


def _indented(text: str) -> Iterator[str]:
    """Lines for a terminal: what a model wrote must not steer it."""
    for line in text.split("\n"):
        yield "    " + printable(line)
