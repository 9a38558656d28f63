"""`async-grpo board DIR`: a run's curves, samples and settings for TensorBoard, made from its files."""

from __future__ import annotations

import argparse
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.cli import options
from async_grpo.errors import DiskFullError
from async_grpo.formatting import counted
from async_grpo.rundir.locks import server_alive
from async_grpo.rundir.paths import RunDir
from async_grpo.settings import not_negative

if TYPE_CHECKING:
    from async_grpo.reports.board import Added, Board

EXAMPLES = """\
  async-grpo board worker                       write event files to worker/board, and say how to see them
  async-grpo board worker --serve               open TensorBoard on them, and add what is new while the run lives
  async-grpo board worker --serve --port 6007   on another port"""

LOOK_EVERY_S = 5.0


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser(
        "board",
        "Make TensorBoard event files of a run's archived groups and metrics: rewards, advantages, lengths, staleness, "
        "timing, workers, sample completions. Calling it again makes them again.",
        EXAMPLES,
    )
    parser.add_argument("directory", type=Path, nargs="?", default=options.DEFAULT_RUN_DIR, help="default: worker/")
    parser.add_argument(
        "--serve", action="store_true", help="open TensorBoard on this machine only; Ctrl-C ends it, not the run"
    )
    parser.add_argument("--port", type=not_negative, default=6006, help="default: 6006; 0: any free one")
    return parser


def run(args: argparse.Namespace) -> int:
    directory: Path = args.directory
    if _is_log_directory(directory):
        if args.serve:
            return _serve(directory, args.port, None)
        print(
            f"{directory} is not a run directory, but holds event files. To see them:\n  {_command(directory)} --serve"
        )
        return 0

    from async_grpo.reports.board import Board, BoardKeptError

    try:
        with Board(directory) as board:
            _report(board, board.update(), again=False)
            if args.serve:
                return _serve(board.folder, args.port, board)
    except BoardKeptError as error:
        if not args.serve:
            raise
        print(error)
        return _serve(RunDir(directory).board, args.port, None)
    print(f"to see them: {_command(directory)} --serve")
    print(f"         or: tensorboard --logdir {shlex.quote(str(board.folder))}")
    return 0


def _is_log_directory(directory: Path) -> bool:
    """Whether it is not a run directory, but has TensorBoard logs."""
    with suppress(PermissionError):
        no_run = directory.is_dir() and not (directory / "run.json").exists()
        return no_run and any(directory.rglob("events.out.tfevents.*"))
    return False


def _report(board: Board, added: Added, *, again: bool) -> None:
    """Say what was written; while serving, only if it is something."""
    if added.steps or added.logged:
        print(f"{board.folder}: {'added ' if again else ''}{_counted(added)}", flush=True)
    elif not again:
        print(f"{board.folder}: nothing yet, no training step is done", flush=True)
    if added.missing:
        print(
            f"{added.missing} groups of these steps were trimmed (--keep-done) or have no usable file: curves lack them"
        )
    options.print_left_out(board.skipped)
    board.skipped.clear()


def _counted(added: Added) -> str:
    return f"{counted(added.steps, 'step')} and {counted(added.logged, 'logged line')}"


def _serve(folder: Path, port: int, board: Board | None) -> int:
    """TensorBoard in this process, until Ctrl-C or SIGTERM."""
    from async_grpo.reports.tensorboard import start
    from async_grpo.setup.process import StopRequest

    stop = StopRequest().install()
    url = start(folder, port)
    print(f"TensorBoard on {folder}: {url} (Ctrl-C ends it, not the run)", flush=True)
    stop.defer()
    live, looked = board is not None and server_alive(board.run.root), time.monotonic()
    while not stop:
        time.sleep(0.2)
        if board is None or time.monotonic() - looked < LOOK_EVERY_S:
            continue
        was_live, live = live, server_alive(board.run.root)  # before the look, which so sees the last of it
        try:
            _report(board, board.update(), again=True)
        except DiskFullError as error:
            print(error, flush=True)
        if was_live and not live:
            print("the run has ended: this is everything, unless it is resumed", flush=True)
        looked = time.monotonic()
    return 0


def _command(directory: Path) -> str:
    from async_grpo.rundir.summary import program

    return f"{program()} board {shlex.quote(str(directory))}"
