"""Count the house, and fail where it is larger than its budgets in house.toml.

    python scripts/house.py           the rooms that the last changes belong to; fails above a budget
    python scripts/house.py --lower   lower each budget to what is there now; none is raised

A room is a package below one of the three packages, `async_grpo/queue`; modules beside them are the room `async_grpo`.
Lines are those of code and docstrings: neither blank nor only a comment.

A budget is lowered by the commit that saves the lines. It is raised, or a new room gets one, only in a commit whose
message begins with `house:` and names, below its first line, what was removed elsewhere or why nothing could be.
`make test-quick` and `make test` call this script, which reads the history of house.toml for that.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = "house.toml"
PREFIX = "house:"
SLACK, FEW = 100, 10  # a budget may be above what is there by one part in so many, or by so few
EXACT = ("train.", "contracts.")  # these may not

Figures = Mapping[str, int]
"""By name: `lines.async_grpo/queue`, `way.files`."""


def figures(root: Path) -> dict[str, int]:
    """What is there now, by name. All but the functions of the way, which only a run shows."""
    lines = Counter(f"lines.{room_of(path)}" for path in _module_of_each_line(root / "src"))
    return {
        **lines,
        "sum.src": lines.total(),
        "sum.tests": sum(1 for _ in _module_of_each_line(root / "tests")),
        "way.files": len(files_of_the_way(root)),
        "train.options": options_of_train(),
        "contracts.exceptions": exceptions(root),
    }


def room_of(path: Path) -> str:
    """The room of a module below `src`: `async_grpo/queue`."""
    return "/".join(path.parts[: min(2, len(path.parts) - 1)])


def _module_of_each_line(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        for line in path.read_text().splitlines():
            if (text := line.strip()) and not text.startswith("#"):
                yield path.relative_to(folder)


def files_of_the_way(root: Path) -> list[str]:
    """Files that one rollout passes: those in docs/design.md, where a test holds them to a recording."""
    block = re.search(r"<!-- route: .*? -->\n```text\n(.*?)\n```", (root / "docs/design.md").read_text(), re.DOTALL)
    return [line.split()[0] for line in block[1].splitlines()] if block else []


def options_of_train() -> int:
    from async_grpo.cli.compute.train import build_parser

    return sum(1 for action in build_parser()._actions if action.option_strings and action.help != argparse.SUPPRESS)


def exceptions(root: Path) -> int:
    """How many imports the contracts in pyproject.toml leave out."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return sum(len(contract.get("ignore_imports", ())) for contract in contracts)


def budgets_of(text: str) -> dict[str, int]:
    """The budgets of a house.toml. Each entry of a list is one, of 1."""
    budgets: dict[str, int] = {}
    for table, entries in tomllib.loads(text).items():
        for name, value in entries.items():
            if isinstance(value, list):
                budgets |= {f"{table}.{name}.{entry}": 1 for entry in value}
            else:
                budgets[f"{table}.{name}"] = value
    return budgets


def wrong(there: Figures, budgets: Figures) -> list[str]:
    """What is above its budget, has none, or is so far below it that others could take what was saved."""
    found = []
    for name, count in there.items():
        budget = budgets.get(name, 0)
        if count > budget:
            found.append(
                f"{name} is {count:,}, {count - budget:,} above its budget. Remove as much there. If nothing can be "
                f'removed, raise the budget in {BUDGETS}, in a commit whose message begins with "{PREFIX}" and says '
                "what was removed elsewhere, or why nothing could be."
            )
        elif budget - count > (0 if name.startswith(EXACT) else max(FEW, budget // SLACK)):
            way_out = f"lower it in {BUDGETS}" if name == "way.functions" else "python scripts/house.py --lower"
            found.append(f"{name} is {count:,}, and its budget is still {budget:,}: {way_out}")
    gone = [name for name in budgets if name.startswith("lines.") and name not in there]
    return found + [f"{name} has a budget, and is not there any more: python scripts/house.py --lower" for name in gone]


def lowered(text: str, there: Figures) -> str:
    """A house.toml in which no budget is above what is there. A room that is gone has none."""
    table, lines = "", []
    for line in text.splitlines():
        if header := re.match(r"\[(\w+)\]", line):
            table = header[1]
        if entry := re.match(r'"?([^"\s]+)"? = (\d+)', line):
            name = f"{table}.{entry[1]}"
            if table == "lines" and name not in there:
                continue
            budget = min(int(entry[2]), there.get(name, sys.maxsize))
            line = line[: entry.start(2)] + str(budget) + line[entry.end(2) :]
        lines.append(line)
    return "\n".join(lines) + "\n"


def raised_in_silence(root: Path) -> list[str]:
    """The budgets of the last commit that are above what the commits with a reason, and the savings since, allow.

    Raises:
        OSError, subprocess.SubprocessError: there is no git, or no repository that it reads.
    """
    log = _git(root, "log", "--topo-order", "--reverse", "--parents", "--format=%H%x00%P%x00%B%x01", "--", BUDGETS)
    allowed: dict[str, Figures] = {}  # after each commit
    last: Figures = {}
    most: Figures = {}
    for entry in log.split("\1"):
        if not entry.strip():
            continue
        commit, parents, message = entry.strip().split("\0")
        last = most = _budgets_at(root, commit)
        before = [allowed[parent] for parent in parents.split()]
        if before and not gives_reason(message):
            most = {name: min(budget, max(it.get(name, 0) for it in before)) for name, budget in last.items()}
        allowed[commit] = most
    return [
        f'{name} is {budget:,} in {BUDGETS}, and no commit whose message begins with "{PREFIX}" and gives a reason '
        f"below its first line raised it above {most[name]:,}: git log -p {BUDGETS}"
        for name, budget in last.items()
        if budget > most[name]
    ]


def gives_reason(message: str) -> bool:
    subject, _, reason = message.partition("\n")
    return subject.startswith(PREFIX) and bool(reason.strip())


def _budgets_at(root: Path, commit: str) -> Figures:
    try:
        listed = _git(root, "ls-tree", "--name-only", commit, BUDGETS)
        return budgets_of(_git(root, "show", f"{commit}:{BUDGETS}")) if listed else {}
    except tomllib.TOMLDecodeError:  # a commit with the marks of a conflict
        return {}


def changed_rooms(root: Path) -> dict[str, list[str]]:
    """The modules of each room that are not as in the last commit, or else those that it changed."""
    names = _git(root, "status", "--porcelain", "--untracked-files=all", "--no-renames", "--", "src")
    paths = [line[3:] for line in names.splitlines()]
    if not paths:
        paths = _git(root, "show", "--format=", "--name-only", "--no-renames", "HEAD", "--", "src").splitlines()
    rooms: dict[str, list[str]] = {}
    for path in map(Path, paths):
        if path.suffix == ".py":
            rooms.setdefault(room_of(path.relative_to("src")), []).append(path.name)
    return rooms


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the house, and fail where it is above its budgets.")
    parser.add_argument("--lower", action="store_true", help=f"lower each budget in {BUDGETS} to what is there now")
    args = parser.parse_args()
    file, there = ROOT / BUDGETS, figures(ROOT)
    if args.lower:
        file.write_text(lowered(file.read_text(), there))
    budgets = budgets_of(file.read_text())
    errors = wrong(there, budgets)
    try:
        for room, modules in changed_rooms(ROOT).items():
            name = f"lines.{room}"
            print(f"{room}: {there.get(name, 0):,} of {budgets.get(name, 0):,} lines; changed: {', '.join(modules)}")
        errors += raised_in_silence(ROOT)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"Whether budgets were raised was not looked for: no history that git reads ({error}).")
    print(f"src: {there['sum.src']:,} of {budgets.get('sum.src', 0):,} lines of code and docstrings")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
