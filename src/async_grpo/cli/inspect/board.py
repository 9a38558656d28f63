"""`async-grpo board RUN_DIR…`: curves, samples and settings of runs for TensorBoard, made from their files."""

from __future__ import annotations

import argparse
import io
import logging
import shlex
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.cli import options
from async_grpo.errors import DiskFullError, UsageError
from async_grpo.formatting import counted
from async_grpo.rundir.locks import server_alive
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.summary import program
from async_grpo.serving.guard import is_to_us
from async_grpo.settings import not_negative

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from async_grpo.reports.board import Added, Board

EXAMPLES = """\
  async-grpo board worker                       write event files to worker/board, and say how to see them
  async-grpo board worker --serve               open TensorBoard on them, and add what is new while the run lives
  async-grpo board worker worker2 --serve       several runs side by side; the HPARAMS tab compares their settings
  async-grpo board worker --serve --port 6007   on another port"""

LOOK_EVERY_S = 5.0
_REFUSAL = b"""This page is for this machine only, as 127.0.0.1 or localhost, and was asked for under another name.
With a name of its own for this address, any web page could read your run (DNS rebinding).
Behind a proxy of your own, let it send the header Host: localhost
"""


@dataclass(slots=True)
class Shown:
    """One of the directories that the command was given."""

    folder: Path  # of its event files
    board: Board | None  # which this process keeps; None: another one's, or no run's
    is_live: bool = False


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser(
        "board",
        "Make TensorBoard event files of a run's archived groups and metrics: rewards, staleness, throughput, "
        "evaluations, lengths, timing, workers, sample completions. Calling it again makes them again.",
        EXAMPLES,
    )
    parser.add_argument(
        "directories",
        type=Path,
        nargs="*",
        metavar="RUN_DIR",
        help="one run, or several to compare (default: worker/); a folder of event files too",
    )
    parser.add_argument(
        "--serve", action="store_true", help="open TensorBoard on this machine only; Ctrl-C ends it, not the run"
    )
    parser.add_argument("--port", type=not_negative, default=6006, help="default: 6006; 0: any free one")
    return parser


def run(args: argparse.Namespace) -> int:
    named: dict[Path, Path] = {}  # each once, as it is spelled first
    for directory in args.directories or [options.DEFAULT_RUN_DIR]:
        named.setdefault(directory.resolve(), directory)
    directories = list(named.values())
    with ExitStack() as resources:
        shown = [_shown(directory, resources, serve=args.serve) for directory in directories]
        if args.serve:
            folder = shown[0].folder
            if len(shown) > 1:
                folder = resources.enter_context(_side_by_side(directories, shown))
            return _serve(folder, args.port, shown)
        it = "it" if len(shown) == 1 else "them"
        print(f"to see {it}: {program()} board {shlex.join(map(str, directories))} --serve")
        if len(shown) == 1:
            print(f"         or: tensorboard --logdir {shlex.quote(str(shown[0].folder))}")
    return 0


def _shown(directory: Path, resources: ExitStack, *, serve: bool) -> Shown:
    """Make the event files of a run, and keep its board until `resources` are closed."""
    if _is_log_directory(directory):
        if not serve:
            print(f"{directory} is not a run directory, but holds event files")
        return Shown(directory, None)

    from async_grpo.reports.board import Board, BoardKeptError

    try:
        board = resources.enter_context(Board(directory))
    except BoardKeptError as error:
        if not serve:
            raise
        print(error)
        return Shown(RunDir(directory).board, None)
    _report(board, board.update(), again=False)
    return Shown(board.folder, board, server_alive(board.run.root))


@contextmanager
def _side_by_side(directories: Sequence[Path], shown: Sequence[Shown]) -> Iterator[Path]:
    """A folder that leads to the event files of each, under the shortest names that tell them apart."""
    with tempfile.TemporaryDirectory(prefix="async-grpo-board-") as folder:
        for name, one in zip(_names(directories), shown, strict=True):
            link = Path(folder) / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(one.folder.absolute())
        yield Path(folder)


def _names(directories: Sequence[Path]) -> list[str]:
    """The last parts of each path: `worker` and `worker2`; `a/worker` and `b/worker`."""
    parts = [directory.resolve().parts for directory in directories]
    length = 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    return ["/".join(part[-length:]).lstrip("/") for part in parts]


def _is_log_directory(directory: Path) -> bool:
    """Whether it is not a run directory, but has TensorBoard logs."""
    with suppress(PermissionError):
        no_run = directory.is_dir() and not (directory / "run.json").exists()
        return no_run and any(directory.rglob("events.out.tfevents.*"))
    return False


def _report(board: Board, added: Added, *, again: bool) -> None:
    """Say what was written; while serving, only if it is something."""
    if added.steps or added.logged:
        what = f"{counted(added.steps, 'step')} and {counted(added.logged, 'logged line')}"
        print(f"{board.folder}: {'added ' if again else ''}{what}", flush=True)
    elif not again:
        print(f"{board.folder}: nothing yet, no training step is done", flush=True)
    if added.missing:
        print(
            f"{added.missing} groups of these steps were trimmed (--keep-done) or have no usable file: curves lack them"
        )
    options.print_left_out(board.skipped)
    board.skipped.clear()


def _serve(folder: Path, port: int, shown: Sequence[Shown]) -> int:
    """TensorBoard in this process, until Ctrl-C or SIGTERM."""
    from async_grpo.setup.process import StopRequest

    stop = StopRequest().install()
    url = start_tensorboard(folder, port)
    print(
        f"TensorBoard on {', '.join(str(one.folder) for one in shown)}: {url} (Ctrl-C ends it, not the run)", flush=True
    )
    stop.defer()
    looked = time.monotonic()
    while not stop.requested:
        time.sleep(0.2)
        if time.monotonic() - looked < LOOK_EVERY_S:
            continue
        for one in shown:
            if one.board is not None:
                _look_again(one, one.board)
        looked = time.monotonic()
    return 0


def start_tensorboard(folder: Path, port: int) -> str:
    """Serve the event files below `folder` on 127.0.0.1, by any free port where it is 0; returns the address.

    Raises:
        UsageError: the port is taken.
    """
    from tensorboard import assets, default, program

    logging.getLogger("tensorboard").setLevel(logging.ERROR)

    class Server(program.WerkzeugServer):
        def __init__(self, app: WSGIApplication, flags: Any) -> None:
            super().__init__(only_for_this_machine(app), flags)

    server = program.TensorBoard(default.get_plugins(), assets.get_default_assets_zip_provider(), server_class=Server)
    arguments = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port), "--reload_interval", "5"]
    server.configure(["tensorboard", *arguments])
    try:
        with redirect_stderr(io.StringIO()):  # an advertisement of its faster loader
            return str(server.launch())
    except program.TensorBoardServerException as error:
        raise UsageError(
            f"TensorBoard cannot use port {port}: another program has it, perhaps another TensorBoard. "
            f"Choose one with --port, or --port 0 for any free one."
        ) from error


def only_for_this_machine(app: WSGIApplication) -> WSGIApplication:
    """Answer only requests that were made to 127.0.0.1 or localhost by name, whatever port a tunnel gives them."""

    def guarded(request: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if is_to_us(str(request.get("HTTP_HOST", ""))):
            return app(request, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [_REFUSAL]

    return guarded


def _look_again(one: Shown, board: Board) -> None:
    was_live, one.is_live = one.is_live, server_alive(board.run.root)  # before the look, which so sees the last of it
    try:
        _report(board, board.update(), again=True)
    except DiskFullError as error:
        print(error, flush=True)
    if was_live and not one.is_live:
        print(f"{board.run.root}: the run has ended: this is everything, unless it is resumed", flush=True)
