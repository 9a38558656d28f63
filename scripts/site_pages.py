"""Hooks of mkdocs: pages that are not in docs/, and links that hold on a code host and on the site.

The README is the first page. A file outside docs/ that a page links to becomes a page under source/, so that the site
is whole without a code host. A link to nothing is left to mkdocs, for which `--strict` makes it an error. The options
in configuration.md come from the commands' own parsers.
"""

from __future__ import annotations

import argparse
import importlib
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = ("examples/README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")  # in the navigation
OPTIONS = "<!-- the options of every command -->"
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json"}
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the README and every file outside docs/ that is linked to from a page, or from such a file."""
    waiting = ["README.md", *ALWAYS]
    for file in files.documentation_pages():
        waiting += links_out(f"docs/{file.src_uri}", (ROOT / "docs" / file.src_uri).read_text())
    added = set()
    while waiting:
        path = waiting.pop()
        if path not in added and not path.startswith("docs/"):
            added.add(path)
            text = page_text(path)
            files.append(File.generated(config, page_of(path), content=text))
            if path.endswith(".md"):
                waiting += links_out(path, text)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into links to their pages."""
    here = page.file.src_uri
    path = path_of(here)
    markdown = markdown.replace(OPTIONS, "\n".join(options_of_every_command()))
    if not path.endswith(".md"):
        return markdown

    def to_page(match: re.Match[str]) -> str:
        target = resolved(path, match[2])
        if target is None:
            return match[0]
        link = posixpath.relpath(page_of(target), posixpath.dirname(here) or ".")
        return f"{match[1]}{link}{match[3] or ''}{match[4]}"

    return LINK.sub(to_page, markdown)


def links_out(path: str, text: str) -> Iterator[str]:
    """The files of the repository outside docs/ that the file at `path` links to."""
    for match in LINK.finditer(text):
        target = resolved(path, match[2])
        if target is not None and not target.startswith("docs/"):
            yield target


def resolved(path: str, link: str) -> str | None:
    """The file of the repository that `link` in the file at `path` means; None if it is of another kind, or broken."""
    if not link or ":" in link or link.startswith("/"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / target).is_dir():
        target += "/README.md"
    return target if (ROOT / target).is_file() else None


def page_of(path: str) -> str:
    """Where in the site a file of the repository is."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def path_of(page: str) -> str:
    """The file of the repository that a page of the site shows."""
    if page == "index.md":
        return "README.md"
    if not page.startswith("source/"):
        return f"docs/{page}"
    path = page.removeprefix("source/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def page_text(path: str) -> str:
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n````\n"


# --- The configuration reference --------------------------------------------------------------------------


def options_of_every_command() -> Iterator[str]:
    """Markdown: a section a command, from its own parser."""
    sys.path.insert(0, str(ROOT / "src"))
    from async_grpo.cli import COMMANDS

    for name, text in COMMANDS.items():
        parser = importlib.import_module(f"async_grpo.cli.{name}").build_parser()
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
    return parser.format_usage().removeprefix("usage: ").strip()


def examples(parser: argparse.ArgumentParser) -> str:
    """The epilog as Markdown: its examples as a block, and what follows them as text."""
    shown, _, rest = (parser.epilog or "").removeprefix("examples:\n").partition("\n\n")
    lines = (line.removeprefix("  ") for line in shown.splitlines())
    return "\n".join(["```bash", *lines, "```", "", rest])
