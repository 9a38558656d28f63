"""`async-grpo status [RUN_DIR]`: what a run does, from its files; live, dead or finished."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from async_grpo.cli import options
from async_grpo.rundir.paths import FAILED

if TYPE_CHECKING:
    from async_grpo.status.snapshot import RunView

EXAMPLES = """\
  async-grpo status                     the run in worker/
  async-grpo status runs/7 --watch      refreshed until the run has ended; Ctrl-C leaves the run alone
  async-grpo status --json | jq .state  for scripts

exit codes: 0 the run lives, or has ended in good order; 1 it failed, or its parameter server is dead;
2 there is no run to look at"""

REFRESH_S = 1.0


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser("status", "Say what a run does, which process waits for which, what holds it up.", EXAMPLES)
    options.add_run_dir(parser)
    parser.add_argument("--watch", "-w", action="store_true", help="refresh in place until the run has ended")
    parser.add_argument("--json", action="store_true", help="one JSON object (with --watch: one a line)")
    return parser


def run(args: argparse.Namespace) -> int:
    from async_grpo.status.diagnosis import DEAD
    from async_grpo.status.snapshot import look

    with _printer(as_json=args.json, watch=args.watch) as show:
        while True:
            view = look(args.run_dir)
            show(view)
            if not (args.watch and view.live):
                return int(view.state in (FAILED, DEAD))
            time.sleep(REFRESH_S)


@contextmanager
def _printer(*, as_json: bool, watch: bool) -> Iterator[Callable[[RunView], object]]:
    """What prints one look; on a terminal a watch refreshes in place."""
    if as_json:
        yield lambda view: print(json.dumps(view.to_json(), indent=None if watch else 2), flush=True)
        return
    from rich.console import Console
    from rich.live import Live

    from async_grpo.status.render import report

    console = Console(highlight=False)
    if watch and console.is_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
            yield lambda view: live.update(report(view), refresh=True)
        return

    def show(view: RunView) -> None:
        console.print(report(view), end="\n\n" if watch else "\n", crop=False)
        console.file.flush()

    yield show
