"""The pages of the docs agree with the code, and have the form that CONTRIBUTING asks for."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from async_grpo.rundir import paths

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    ]
)
WIDTH = 100
PACKAGES = ("async_grpo", "async_grpo_experiments", "async_grpo_ipc")


def test_every_file_of_a_run_directory_is_on_its_page() -> None:
    page = (ROOT / "docs" / "file_lifecycle_documentation.md").read_text()
    missing = [name for name in paths.ENTRIES if f"`{name}" not in page[: page.index("## A live run")]]
    assert not missing, f"the table of docs/file_lifecycle_documentation.md lacks {missing}"


def test_every_environment_variable_that_is_read_is_on_the_page_of_the_configuration() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    reads = re.compile(r"""(?:environ|env)(?:\.get|\.setdefault|\.pop)?[\[(]\s*"([A-Z][A-Z0-9_]+)\"""")
    modules = [path for package in PACKAGES for path in (ROOT / "src" / package).rglob("*.py")]
    names = {name for module in modules for name in reads.findall(module.read_text())}
    assert "WORKER_DEVICE" in names, "the pattern finds nothing"
    unnamed = [name for name in sorted(names) if f"`{name}`" not in page]
    assert not unnamed, f"docs/configuration.md does not say what {', '.join(unnamed)} mean"


@pytest.mark.parametrize("listing", ["live", "stopped", "finished", "summary", "aside"])
def test_the_listings_are_there(listing: str) -> None:
    page = (ROOT / "docs" / "file_lifecycle_documentation.md").read_text()
    block = re.search(rf"<!-- listing: {listing} -->\n```\w*\n(.*?)\n```", page, re.DOTALL)
    assert block is not None and len(block[1]) > 20


def test_no_page_has_a_path_of_the_machine_that_it_was_made_on() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    assert not [page.name for page in pages if str(ROOT) in page.read_text()]


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page with their numbers, without code, tables, pictures, and what scripts put between marks."""
    outside = True
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```") or line.startswith(("<!-- begin:", "<!-- end:")):
            outside = not outside
        elif outside and not line.startswith(("|", "![", "    ")):
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped(page: Path) -> None:
    too_long = [f"{page.name}:{number}" for number, line in prose(page) if len(line) > WIDTH and " " in line.strip()]
    assert not too_long


@pytest.mark.parametrize("page", ["README.md", "docs/quick_start.md"])
def test_a_page_that_claims_plain_trl_says_what_it_needs_without_a_gpu(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    claim = text.index("plain TRL too")
    assert text[claim:].startswith("plain TRL too (TRL 1.15 needs a GPU for that; without one, start it with `async-gr")


def test_the_navigation_calls_each_page_as_the_page_itself_does() -> None:
    entries = re.findall(r'^ +- "?([^"\n]*?)"?: (\S+\.md)$', (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(entries) > 30
    others = []
    for title, page in entries:
        file = ROOT / page.removeprefix("source/") if page.startswith("source/") else ROOT / "docs" / page
        heading = file.read_text().splitlines()[0] if page != "index.md" else f"# {title}"  # of the README: the project
        others += [f"{page}: {title!r}, {heading!r}"] if heading.replace("`", "") != f"# {title}" else []
    assert not others, "the site would call a page by two names"


def test_the_glossary_has_at_most_twenty_terms() -> None:
    rows = (ROOT / "docs" / "glossary.md").read_text().split("|---|---|\n")[1].strip().splitlines()
    assert 10 <= len(rows) <= 20


def test_the_layers_on_the_page_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert "```text\n" + "\n".join(layers) + "\n```" in (ROOT / "docs" / "design.md").read_text()


def test_every_room_is_on_the_page_and_begins_where_it_says() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| .* \| `([\w/]+)` \|$", page, re.MULTILINE)
    rooms = {
        path.parent.name if package == "async_grpo" else f"{package}.{path.parent.name}"
        for package in ("async_grpo", "async_grpo_experiments")
        for path in (ROOT / "src" / package).glob("*/__init__.py")
    }
    assert sorted(room for room, _ in rows) == sorted(rooms | {"async_grpo_ipc"})
    own = {room: room if room.startswith("async_grpo_") else f"async_grpo.{room}" for room, _ in rows}
    folders = {room: ROOT / "src" / name.replace(".", "/") for room, name in own.items()}
    assert not [f"{room}/{start}" for room, start in rows if not (folders[room] / f"{start}.py").is_file()]


def test_the_five_files_to_read_have_what_the_page_says() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| `(async_grpo/.*\.py)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for file, told in rows:
        source = (ROOT / "src" / file).read_text()
        for name in re.findall(r"`(\w+)(?:\.\w+)?`", told):
            assert re.search(rf"^class {name}\b", source, re.MULTILINE), f"{file} does not define {name}"


def test_every_place_to_look_is_where_the_table_says() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| Where .* \| `(.*)` \| `(\w+)` \|$", page, re.MULTILINE)
    assert len(rows) == 14
    for file, name in rows:
        defined = rf"^\s*(?:def|class) {name}\b|^{name}(?::.*)? = "
        assert re.search(defined, (ROOT / file).read_text(), re.MULTILINE), f"{file} does not define {name}"


def test_every_module_that_a_page_names_exists() -> None:
    folders = (ROOT, ROOT / "src", *(ROOT / "src" / package for package in PACKAGES))
    missing = [
        f"{page.name}: {path}"
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|sh))`", page.read_text())
        if "NAME" not in path and not any((folder / path).is_file() for folder in folders)
    ]
    assert not missing


def test_every_member_that_the_api_lists_exists() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"^::: ([\w.]+)\n((?:    .*\n)*)", page, re.MULTILINE)
    members = {module: found[1] for module, options in blocks if (found := re.search(r"members: \[(.*)\]", options))}
    assert len(members) >= 4
    for module, names in members.items():
        source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text()
        missing = [
            name for name in names.split(", ") if not re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE)
        ]
        assert not missing, f"{module} does not define {missing}"


def test_the_changelog_has_each_heading_once_and_no_rest_of_an_entry() -> None:
    unreleased = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert re.findall(r"(?m)^### (.*)$", unreleased) == ["Added", "Changed", "Fixed"]
    rests = [rest for rest in re.findall(r"\.\n  [a-z].*", unreleased) if not rest[4:].startswith("e.g.")]
    assert not rests, "a merge has left the end of an entry behind another one"
    entries = re.findall(r"(?m)^- .*\n(?:  .*\n)*", unreleased)
    assert len({*entries}) == len(entries)
    assert not re.findall(r"\n  .*\n\n- ", unreleased), "an empty line between two entries"


# --- Rules for the sources: --------------------------------------------------------------------------------------

SRC, TESTS = Path(__file__).parents[2] / "src", Path(__file__).parents[1]
INTEGERS = ("arange", "randperm")
OTHERS = ("as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")
MAKERS = {*INTEGERS, *OTHERS}


def test_no_class_has_the_name_of_another() -> None:
    """A `_` in front of it makes no difference."""
    definitions: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                definitions[node.name.lstrip("_")].append(f"{path.relative_to(SRC)}:{node.lineno}")
    assert {name: found for name, found in definitions.items() if len(found) > 1} == {}


def test_each_tensor_names_its_dtype_and_device() -> None:
    """A setup file may have changed the default ones, which are those of the process."""
    silent = []
    for path in sorted(SRC.glob("async_grpo*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (maker := ast.unparse(node.func)).startswith("torch."):
                needed = {"device"} if maker[6:] in INTEGERS else {"device", "dtype"}
                if maker[6:] in MAKERS and needed - {keyword.arg for keyword in node.keywords}:
                    silent.append(f"{path.relative_to(SRC)}:{node.lineno}: {ast.unparse(node)}")
    assert silent == []


def test_no_test_module_imports_another() -> None:
    """What several share is in `tests/kit`, or in a module beside them."""
    imports = re.compile(r"^\s*(?:from|import) (test_\w+)", re.MULTILINE)
    found = {path: {*imports.findall(path.read_text())} - {path.stem} for path in TESTS.rglob("*.py")}
    assert not {path: others for path, others in found.items() if others}


# --- Docstrings begin with a verb or a noun: ---------------------------------------------------------------------

FOLDERS = ("src", "tests", "benchmarks", "scripts", "examples")
FRAGMENTS = ("Of ", "That ")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(source: str) -> Iterator[tuple[str, str]]:
    """The name and the first line of each docstring that begins with one of these words."""
    if not re.search(rf'"""\s*({"|".join(FRAGMENTS)})', source):
        return  # most files need not be parsed
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text is not None and text.startswith(FRAGMENTS):
            yield getattr(node, "name", "the module"), text.splitlines()[0]


def test_no_docstring_begins_with_of_or_that() -> None:
    modules = [sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS]
    found = [(str(it.relative_to(ROOT)), *found) for it in chain(*modules) for found in fragments(it.read_text())]
    assert all(modules) and not found, "begin with a verb or a noun"


def test_a_fragment_is_found() -> None:
    assert list(fragments('class Shares:\n    """Of the last minute.\n\n    Of the workers.\n    """\n')) == [
        ("Shares", "Of the last minute.")
    ]
    assert not list(fragments('"""Offers."""\n\ndef of():\n    """Shares of the last minute."""\n'))
