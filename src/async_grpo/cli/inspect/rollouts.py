"""`async-grpo rollouts RUN_DIR`: read what the model wrote, in the terminal or as a page."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.cli import options
from async_grpo.cli.inspect.queue import group_number
from async_grpo.errors import UsageError
from async_grpo.formatting import as_text, counted, printable
from async_grpo.queue.listing import quarantined
from async_grpo.rundir.paths import RUNNING
from async_grpo.settings import not_negative, positive

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from async_grpo.archive.groups import FinishedGroup, FinishedGroups
    from async_grpo.records import RolloutGroup
    from async_grpo.reports.rollouts import Rollout, Selection

EXAMPLES = """\
  async-grpo rollouts worker                      the newest completions
  async-grpo rollouts worker --worst --limit 5    those with the lowest reward
  async-grpo rollouts worker --step 40 --best     the best that optimizer step 40 was trained on
  async-grpo rollouts worker --job 42             group 42, in full
  async-grpo rollouts worker --eval --worst       what evaluations asked, the lowest rewards first
  async-grpo rollouts worker --html page.html     everything as one page to search, filter and plot"""

SHOWN, SHOWN_AS_PAGE = 16, 20_000  # completions, unless --limit says otherwise
_LINES, _CHARACTERS = 12, 800  # of a completion, in a list


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser(
        "rollouts",
        "Read what the model wrote: prompts, completions, rewards, advantages, versions. Works on a live run.",
        EXAMPLES,
    )
    options.add_run_dir(parser)
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="the lowest rewards first")
    order.add_argument("--best", action="store_true", help="the highest rewards first")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--step", type=not_negative, metavar="N", help="only what optimizer step N used")
    one.add_argument("--job", type=group_number, metavar="ID", help="only this prompt group, in full")
    parser.add_argument(
        "--eval", action="store_true", help="what evaluations asked; with --step, the evaluation of version N"
    )
    parser.add_argument("--node", metavar="NAME", help="only what this machine generated, of a run with --ray")
    parser.add_argument(
        "--limit", type=positive, metavar="N", help=f"completions (default: {SHOWN}; of a page {SHOWN_AS_PAGE})"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page instead")
    return parser


def run(args: argparse.Namespace) -> int:
    from async_grpo.archive.groups import FinishedGroups
    from async_grpo.deltas.chain import kept_of
    from async_grpo.reports.rollouts import BEST, NEWEST, WORST, select

    groups = FinishedGroups(args.run_dir)
    usual = SHOWN_AS_PAGE if args.html else None if args.job is not None else SHOWN
    order = WORST if args.worst else BEST if args.best else NEWEST
    selection = select(
        groups,
        order=order,
        limit=args.limit or usual,
        step=args.step,
        job=args.job,
        evaluations=args.eval,
        node=args.node,
    )
    if not selection.rollouts:
        raise UsageError(_nothing(args, groups))
    if args.html:
        from async_grpo.reports.rollouts_page import write_page

        size = write_page(args.html, groups, selection)
        print(
            f"{args.html}: {counted(len(selection.rollouts), 'completion')}, {size / 1e6:.1f} MB; open it in a browser"
        )
        if selection.more:
            print(f"only the newest {len(selection.rollouts)} are in it; --limit N takes more")
    else:
        _show(selection, groups, whole=args.job is not None)
    versions = {rollout.found.group.policy_version for rollout in selection.rollouts}
    if not args.html and (told := kept_of(args.run_dir, versions)):
        print(told)
    options.print_left_out(groups.skipped)
    return 0


def _nothing(args: argparse.Namespace, groups: FinishedGroups) -> str:
    root = args.run_dir
    if args.node is not None:
        return f"No group that is asked for was made on node {args.node!r}: `audit` lists the nodes of a run."
    if args.eval and args.job is None:
        which = "" if args.step is None else f" of version {args.step}"
        return f"{root} has no group of an evaluation{which}: see `--eval-every` of `async-grpo train`."
    if args.job is not None:
        for aside in quarantined(root) if (root / "quarantine").is_dir() else []:
            if aside.seq == args.job:
                return f"Group {args.job} is not finished: it is in quarantine/ ({aside.kind}).\n{aside.reason.strip()}"
        return f"There is no finished group {args.job} in {root}: not issued, not finished, or trimmed (`--keep-done`)."
    if args.step is not None:
        return f"No group of step {args.step} is in {root}: the run has not reached it, or its groups were trimmed."
    if groups.skipped:
        why = next(iter(groups.skipped.values()))
        return f"None of the {len(groups.skipped)} finished groups in {root} can be used. The first: {why}"
    return f"{root} has no finished group yet."


def _show(selection: Selection, groups: FinishedGroups, *, whole: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    ended = groups.condition() != RUNNING
    for _, together in groupby(selection.rollouts, key=lambda rollout: rollout.found.group.job.seq):
        rollouts = list(together)
        _show_group(console, rollouts[0].found, ended=ended)
        for rollout in rollouts:
            for line in _lines(rollout, console, whole=whole):
                console.print(line)
    shown = len(selection.rollouts)
    if selection.more:
        console.print(f"\nthe newest {shown}. Others: --limit, --step, --worst, --best, --html FILE", style="dim")
    elif selection.completions > shown:
        console.print(f"\n{shown} of {selection.completions} completions. More: --limit, --html FILE", style="dim")


def _show_group(console: Console, found: FinishedGroup, *, ended: bool) -> None:
    from rich.rule import Rule
    from rich.text import Text

    from async_grpo.archive.groups import WAITING
    from async_grpo.reports.rollouts import row_of

    group = found.group
    mark = "bold yellow" if found.fate.state == WAITING else ""
    title = Text.assemble((f"group {group.job.seq}", "bold"), "  ", (printable(about(found, ended=ended)), mark))
    console.print(Rule(title, align="left"))
    row = row_of(group)
    shown = {name: value for name, value in row.items() if name == "prompt"} or row
    others = {name: value for name, value in row.items() if name not in shown}
    for name, value in (*shown.items(), *others.items()):
        text = printable(as_text(value))
        separator = "\n" if "\n" in text else " "
        console.print(Text.assemble((f"{printable(name)}:", "cyan"), separator, _cut(text, whole=False)))


def about(found: FinishedGroup, *, ended: bool) -> str:
    """Who generated it, with what, and what became of it."""
    from async_grpo.archive.groups import EVALUATED

    group, fate = found.group, found.fate
    tries = f", try {group.attempt + 1}" if group.attempt else ""
    made = f"{maker(group)}, policy {group.policy_version}{tries}"
    if fate.step is not None:
        return f"step {fate.step}, staleness {found.staleness}, {made}"
    if fate.state == EVALUATED:
        return f"evaluation of version {group.policy_version}, {maker(group)}{tries}"
    if fate.reason:
        return f"dropped: {fate.reason}, {made}"
    return f"{'left over when the run ended, not trained on' if ended else 'not used yet'}, {made}"


def maker(group: RolloutGroup) -> str:
    """`dev1`, or `dev8 on gpu3`."""
    return f"{group.worker} on {group.node}" if group.node else group.worker


def _lines(rollout: Rollout, console: Console, *, whole: bool) -> Iterator[Text]:
    """One line where the completion fits into it, else its text below."""
    from rich.text import Text

    from async_grpo.reports.rollouts import in_a_line

    head = Text.assemble((f" {_number(rollout.total):>6} ", _style(rollout)), " ")
    if rollout.advantage is not None:
        head.append(f"advantage {rollout.advantage:+.2f}  ")
    head.append(f"{counted(rollout.length, 'token'):>11}", "dim")
    if len(rollout.rewards) > 1:
        each = "  ".join(f"{name} {_number(value)}" for name, value in rollout.rewards.items())
        head.append(f"  {printable(each)}", "dim")
    if rollout.turn_rewards:
        head.append(f"  turn rewards {in_a_line(rollout.turn_rewards)}", "dim")
    group = rollout.found.group
    lines = _cut(printable(as_text(group.completions[rollout.index])), whole=whole).split("\n")
    if len(lines) == 1 and len(head) + 2 + len(lines[0]) <= console.width:
        yield Text.assemble(head, "  ", lines[0])
    else:
        yield head
        for line in Text("\n".join(lines)).wrap(console, console.width - 4):  # so that wrapped lines are indented
            line.rstrip()
            yield Text.assemble("    ", line)
    for name, value in rollout.columns if whole else rollout.own_prompt:
        text = _cut(printable(as_text(value)), whole=whole)
        yield Text.assemble("    ", (f"{printable(name)}: ", "cyan"), text)


def _cut(text: str, *, whole: bool) -> str:
    if whole:
        return text
    lines = text[:_CHARACTERS].split("\n")
    shown = "\n".join(lines[:_LINES])
    left = len(text) - len(shown)
    return f"{shown} … {left:,} more characters (--job shows all)" if left else shown


def _number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.3g}"


def _style(rollout: Rollout) -> str:
    """Better than its group, worse, or neither."""
    if rollout.advantage is None or abs(rollout.advantage) < 1e-6:
        return "reverse"
    return "black on green" if rollout.advantage > 0 else "black on red"
