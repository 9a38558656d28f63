"""Write the pages of the site into build/pages, from which `zensical build` makes it (`make docs` runs both).

The README becomes the first page. A file outside docs/ that a page links to becomes a page under source/, so that the
site is complete without a code host. The options in configuration.md come from the commands' own parsers.
A link to a file, an image or a page of the navigation that does not exist is an error here; a broken anchor and an
unknown name in api.md are errors with `zensical build --strict`.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
ALWAYS = ("examples/README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")  # in the navigation
OPTIONS = "<!-- the options of every command -->"
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json"}
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")


def write_pages(folder: Path) -> None:
    """Fill `folder`, emptied first, with docs/, the README, and every file that one of these pages links to."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    waiting = ["README.md", *ALWAYS, *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
    written = set()
    while waiting:
        path = waiting.pop()
        if path in written:
            continue
        written.add(path)
        text = page_text(path)
        target = folder / page_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(for_site(path, text))
        if path.endswith(".md"):
            waiting += links_out(path, text)
    for page in re.findall(r": (\S+\.md)$|- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE):
        if not (folder / "".join(page)).is_file():
            sys.exit(f"mkdocs.yml has a page in its navigation that does not exist: {''.join(page)}")


def for_site(path: str, text: str) -> str:
    """The text of the file at `path`, with links to files of the repository turned into links to their pages."""
    if not path.endswith(".md"):
        return text
    text = text.replace(OPTIONS, "\n".join(options_of_every_command())) if OPTIONS in text else text
    here = posixpath.dirname(page_of(path)) or "."

    def to_page(match: re.Match[str]) -> str:
        target = resolved(path, match[2])
        if target is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(page_of(target), here)}{match[3] or ''}{match[4]}"

    return LINK.sub(to_page, text)


def links_out(path: str, text: str) -> Iterator[str]:
    """The files of the repository outside docs/ that the file at `path` links to."""
    for match in LINK.finditer(text):
        target = resolved(path, match[2])
        if target is not None and not target.startswith("docs/"):
            yield target


def resolved(path: str, link: str) -> str | None:
    """The file of the repository that `link` in the file at `path` means; None for a link of another kind."""
    if not link or ":" in link or link.startswith("/"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / target).is_dir():
        target += "/README.md"
    if not (ROOT / target).is_file():
        sys.exit(f"{path} has a link to a file that does not exist: {link}")
    return target


def page_of(path: str) -> str:
    """Where in the site a file of the repository is."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def page_text(path: str) -> str:
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n````\n"


# --- The configuration reference --------------------------------------------------------------------------


def options_of_every_command() -> Iterator[str]:
    """Markdown: a section a command, from its own parser."""
    sys.path.insert(0, str(ROOT / "src"))
    from async_grpo.cli import COMMANDS, command_module

    for name, text in COMMANDS.items():
        parser = command_module(name).build_parser()
        yield f"\n### async-grpo {name}\n\n{text[0].upper()}{text[1:]}.\n"
        yield f"```text\n{usage(parser)}\n```\n"
        yield from table(parser)
        if parser.epilog:
            yield f"\n{examples(parser)}\n"


def table(parser: argparse.ArgumentParser) -> Iterator[str]:
    """One row an argument, those of actions within the command included."""
    yield "| argument | meaning |\n|---|---|"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, inner in action.choices.items():
                yield f"| `{name}` | {cell(helps.get(name, ''))} |"
                yield from (f"| `{name} {shown(a)}` | {cell(a.help)} |" for a in inner._actions if public(a))
        elif public(action):
            yield f"| `{shown(action)}` | {cell(action.help)} |"


def public(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and action.dest != "help"


def shown(action: argparse.Action) -> str:
    """`--steps, -s STEPS`, or the name of a positional argument."""
    value = action.metavar if isinstance(action.metavar, str) else None
    if action.choices is not None and value is None:
        value = ", ".join(map(str, action.choices))
    value = value or action.dest.upper()
    if not action.option_strings:
        return f"[{value}]" if action.nargs == "?" else value
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def cell(text: str | None) -> str:
    return (text or "").replace("%%", "%").replace("|", "\\|")


def usage(parser: argparse.ArgumentParser) -> str:
    return re.sub(r"\n +", "\n    ", parser.format_usage().removeprefix("usage: ").strip())


def examples(parser: argparse.ArgumentParser) -> str:
    """The epilog as Markdown: its examples as a block, and what follows them as text."""
    shown, _, rest = (parser.epilog or "").removeprefix("examples:\n").partition("\n\n")
    lines = (line.removeprefix("  ") for line in shown.splitlines())
    return "\n".join(["```bash", *lines, "```", "", rest])


if __name__ == "__main__":
    write_pages(PAGES)
