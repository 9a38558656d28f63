"""`async-grpo delta verify|rebuild|stats|diff DIR`: the versions that a run kept with --delta-every."""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.cli import options
from async_grpo.errors import DeltaChainError
from async_grpo.formatting import counted, printable, size
from async_grpo.settings import comma_separated, not_negative

if TYPE_CHECKING:
    from async_grpo.deltas.chain import Chain
    from async_grpo.deltas.statistics import Statistics

EXAMPLES = """\
  async-grpo delta verify worker                         rebuild every version, compare hashes, name what is damaged
  async-grpo delta rebuild worker --step 137             that version as a folder for transformers
  async-grpo delta stats worker --plot deltas.png        what changes, where and when; a heat map
  async-grpo delta diff worker 100 137                   which tensors differ
  async-grpo evaluate worker@137 --config my_trainer.py  what a version can do"""

SHOWN = 20  # rows of a table


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser("delta", "Verify, rebuild and study the versions that a run kept.", EXAMPLES)
    commands = parser.add_subparsers(dest="action", required=True, metavar="verify|rebuild|stats|diff")
    verify = commands.add_parser("verify", help="rebuild every version and compare its hash")
    rebuild = commands.add_parser("rebuild", help="write a version as a folder that transformers or PEFT loads")
    rebuild.add_argument("--step", type=not_negative, metavar="N", help="default: the newest")
    rebuild.add_argument("--output", type=Path, metavar="FOLDER", help="default: version-N in the current folder")
    stats = commands.add_parser("stats", help="what changes, by step, layer and kind of matrix")
    stats.add_argument(
        "--over", type=comma_separated, default=(2, 8, 32), metavar="K,K", help="and over K versions (default: 2,8,32)"
    )
    stats.add_argument("--plot", type=Path, metavar="FILE", help="a picture: heat maps over the versions (.png, .svg)")
    diff = commands.add_parser("diff", help="which tensors differ between two versions")
    for command in (verify, rebuild, stats, diff):
        command.add_argument("folder", type=Path, metavar="DIR", help="a run directory, or a chain's folder")
    for command in (verify, stats, diff):
        command.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    for name in ("old", "new"):
        diff.add_argument(name, type=not_negative, metavar=name.upper())
    return parser


def run(args: argparse.Namespace) -> int:
    from async_grpo.setup.process import keep_freed_memory

    keep_freed_memory(os.environ)  # a version is rebuilt tensor by tensor, of arrays that come and go
    return {"verify": _verify, "rebuild": _rebuild, "stats": _stats, "diff": _diff}[args.action](args)


def _chain(folder: Path) -> Chain:
    from async_grpo.deltas.chain import Chain, chain_folder

    return Chain(chain_folder(folder))


def _verify(args: argparse.Namespace) -> int:
    chain = _chain(args.folder)
    verdict = chain.verify()
    for problem in verdict.problems:
        print(printable(f"broken: {problem}"))
    if args.json is not None:
        problems = [asdict(problem) for problem in verdict.problems]
        _write_json(args.json, {"versions": verdict.versions, "up_to": verdict.intact_up_to, "problems": problems})
    found = f"{counted(len(verdict.versions), 'version')} rebuilt with the hashes that they were written with"
    if not verdict.problems:
        newest = f", up to version {verdict.intact_up_to}" if verdict.versions else ""
        print(f"intact: {found}{newest}, in {chain.folder}")
        return 0
    up_to = "not even its first version" if verdict.intact_up_to is None else f"up to version {verdict.intact_up_to}"
    later = [version for version in verdict.versions if version > (verdict.intact_up_to or 0)]
    again = f", and again {counted(len(later), 'version')} from {later[0]} to {later[-1]}" if later else ""
    print(f"intact {up_to}{again}: {found}, in {chain.folder}")
    return 1


def _rebuild(args: argparse.Namespace) -> int:
    from async_grpo.deltas.checkpoint import write_checkpoint

    chain = _chain(args.folder)
    if not chain.versions:
        raise DeltaChainError(f"{chain.folder} has no version yet.")
    version = chain.versions[-1] if args.step is None else args.step
    folder = args.output or Path(f"version-{version}")
    weights = write_checkpoint(chain, version, folder)
    print(printable(f"{folder}: version {version} of run {chain.about.run_id}, {size(weights.stat().st_size)}"))
    print(f"hash {chain.entries[version].header.result}, as it was written")
    if chain.about.frozen is not None:
        print(printable(f"an adapter, for the base whose frozen weights have the hash {chain.about.frozen}"))
    return 0


def _stats(args: argparse.Namespace) -> int:
    from async_grpo.deltas.statistics import statistics

    chain = _chain(args.folder)
    found = statistics(chain, args.over)
    for problem in found.problems:
        print(printable(f"left out: {problem}"))
    if not found.steps:
        print(f"{chain.folder} has no two versions that can be compared")
        return 0
    _show(found)
    if args.json is not None:
        _write_json(args.json, asdict(found))
    if args.plot is not None:
        from async_grpo.deltas.statistics import draw

        draw(found, args.plot, title=f"Run {chain.about.run_id}: what changes from version to version")
        print(f"{args.plot}: a heat map of {len(found.layers)} rows and {len(found.steps)} versions")
    return 0


def _show(found: Statistics) -> None:
    steps = found.steps
    every = -(-len(steps) // SHOWN)
    rows = [
        [
            str(step.version) + (f" (spans {step.span})" if step.span > 1 else ""),
            f"{step.unchanged:.2%}",
            "" if step.jaccard is None else f"{step.jaccard:.2f}",
            size(step.file_bytes) + (" snapshot" if step.is_snapshot else ""),
            f"{step.weights_bytes / step.file_bytes:.1f} x",
        ]
        for step in steps[::every]
    ]
    shown = f" (every {every}th shown)" if every > 1 else ""
    options.print_table(
        f"{len(steps)} versions{shown}", ["version", "unchanged", "Jaccard", "file", "smaller than weights"], rows
    )
    over = {1: sum(step.unchanged for step in steps) / len(steps), **found.unchanged_over}
    options.print_table(
        "unchanged over k versions, mean", ["k", "unchanged"], [[str(k), f"{v:.2%}"] for k, v in over.items()]
    )
    for title, by in (("layer", "by_layer"), ("kind of matrix", "by_kind")):
        sums: defaultdict[str, float] = defaultdict(float)
        for step in steps:
            for name, share in getattr(step, by).items():
                sums[name] += share
        names = found.layers if by == "by_layer" else sorted(sums, key=lambda name: -sums[name])
        options.print_table(
            f"by {title}, mean", [title, "changed"], [[name, f"{sums[name] / len(steps):.2%}"] for name in names]
        )


def _diff(args: argparse.Namespace) -> int:
    from async_grpo.deltas.statistics import differences, total

    chain = _chain(args.folder)
    found = differences(chain.rebuild(args.old), chain.rebuild(args.new))
    share = total(found.values())
    print(f"version {args.old} to {args.new}: {share.changed:,} of {share.size:,} elements differ ({share.value:.2%})")
    by_share = sorted(found.items(), key=lambda item: -item[1].value)
    rows = [[name, f"{share.value:.2%}", f"{share.changed:,} of {share.size:,}"] for name, share in by_share[:SHOWN]]
    more = f", the first {SHOWN} of {len(found)}" if len(found) > SHOWN else ""
    options.print_table(f"by tensor{more}", ["tensor", "differ", "elements"], rows)
    if args.json is not None:
        tensors = {name: share._asdict() for name, share in found.items()}
        _write_json(args.json, {"old": args.old, "new": args.new, "tensors": tensors})
    return 0


def _write_json(path: Path, figures: dict[str, Any]) -> None:
    path.write_text(json.dumps(figures, indent=2) + "\n")
