"""What the docs list is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_grpo.rundir import paths

ROOT = Path(__file__).parents[2]


def test_every_file_of_a_run_directory_is_on_its_page() -> None:
    page = (ROOT / "docs" / "file_lifecycle_documentation.md").read_text()
    table = page[: page.index("## A live run")]
    missing = [name for name in paths._ENTRIES if f"`{name}" not in table]
    assert not missing, f"the table of docs/file_lifecycle_documentation.md lacks {missing}"


def test_every_environment_variable_that_is_read_is_on_the_page_of_the_configuration() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    reads = re.compile(r"""(?:environ|env)(?:\.get|\.setdefault|\.pop)?[\[(]\s*"([A-Z][A-Z0-9_]+)\"""")
    modules = [path for package in ("async_grpo", "async_grpo_ipc") for path in (ROOT / "src" / package).rglob("*.py")]
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
