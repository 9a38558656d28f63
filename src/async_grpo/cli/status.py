"""`async-grpo status [RUN_DIR]`: what a run does, from its files; live, dead or finished."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
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
    parser = options.parser("status", "Say what a run does, who waits for whom, and what holds it up.", EXAMPLES)
    parser.add_argument("run_dir", type=Path, nargs="?", default=options.DEFAULT_RUN_DIR, help="default: worker/")
    parser.add_argument("--watch", "-w", action="store_true", help="refresh in place until the run has ended")
    parser.add_argument("--json", action="store_true", help="one JSON object (with --watch: one a line)")
    return parser


def run(args: argparse.Namespace) -> int:
    from async_grpo.status.snapshot import look

    if args.watch:
        return _watch(args.run_dir, as_json=args.json)
    view = look(args.run_dir)
    if args.json:
        print(json.dumps(view.to_json(), indent=2))
    else:
        from rich.console import Console

        from async_grpo.status.render import report

        Console(highlight=False).print(report(view))
    return exit_code(view)


def exit_code(view: RunView) -> int:
    from async_grpo.status.diagnosis import DEAD

    return int(view.state in (FAILED, DEAD))


def _watch(run_dir: Path, *, as_json: bool) -> int:
    if as_json:
        for view in _views(run_dir):
            print(json.dumps(view.to_json()), flush=True)
        return exit_code(view)

    from rich.console import Console
    from rich.live import Live

    from async_grpo.status.render import report

    console = Console(highlight=False)
    if not console.is_terminal:  # nothing can be refreshed in place
        for view in _views(run_dir):
            console.print(report(view), end="\n\n")
            console.file.flush()
        return exit_code(view)
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        for view in _views(run_dir):
            live.update(report(view), refresh=True)
    return exit_code(view)


def _views(run_dir: Path) -> Iterator[RunView]:
    """One after another, until the run has ended."""
    from async_grpo.status.snapshot import look

    while (view := look(run_dir)).live:
        yield view
        time.sleep(REFRESH_S)
    yield view
