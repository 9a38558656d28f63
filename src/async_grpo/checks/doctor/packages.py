"""Installed packages, against what Async-GRPO needs and the tested set. Imports none of them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib import metadata, resources

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from async_grpo.checks.doctor.finding import Asked, Finding, error, ok, warning
from async_grpo.version import __version__

TESTED_PYTHON = "3.11"
UNIT_TESTED_PYTHONS = ("3.12", "3.13")
ENGINES = {"vllm": "vllm", "unsloth": "unsloth", "bitsandbytes": "qlora"}  # distribution -> our extra
MAIN = (
    *("torch", "transformers", "trl", "datasets", "accelerate", "peft", "tokenizers", "numpy", "safetensors"),
    *("huggingface_hub", "tensorboard", "loguru", "filelock", "psutil", "rich", "pyarrow"),
)
_CONSTRAINTS = resources.files("async_grpo").joinpath("constraints.txt")
_INSTALL = f"pip install -c {_CONSTRAINTS} async-grpo"

Installed = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tested_set() -> dict[str, str]:
    """Name -> version, of the constraints that the tests ran with."""
    lines = (line.strip() for line in _CONSTRAINTS.read_text(encoding="utf-8").splitlines())
    pins = (line.partition("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, equal, version in pins if equal}


def needed(extra: str = "") -> list[Requirement]:
    """The needs of Async-GRPO itself, or with an extra; empty where it runs without being installed."""
    if installed("async-grpo") is None:
        return []
    every = map(Requirement, metadata.requires("async-grpo") or [])
    return [each for each in every if each.marker is None or each.marker.evaluate({"extra": extra})]


def packages(asked: Asked, version_of: Installed = installed) -> Iterator[Finding]:
    """A main package that is missing or out of range is an error, another version than tested a warning.

    The optional engines are compared with the versions that our extras ask for. For their own needs there is `pip
    check`.
    """
    python = platform.python_version()
    yield ok("async-grpo", f"{__version__} on Python {python}, {platform.system()} {platform.release()}")
    if python.rpartition(".")[0] not in (TESTED_PYTHON, *UNIT_TESTED_PYTHONS):
        fix = f"If it fails: an environment of Python {TESTED_PYTHON}."
        yield warning("Python", f"{python}; no tests run on it, and all tests on {TESTED_PYTHON}", fix)
    for requirement in needed():
        have = version_of(requirement.name)
        if have is None:
            yield error(requirement.name, f"not installed; {requirement} is needed", _INSTALL)
        elif not requirement.specifier.contains(have, prereleases=True):
            yield error(requirement.name, f"{have}, but {requirement} is needed", _INSTALL)
    yield _against_tested(version_of)
    for name, extra in ENGINES.items():
        have, wanted = version_of(name), [each for each in needed(extra) if each.name == name]
        if have is not None and not all(each.specifier.contains(have, prereleases=True) for each in wanted):
            fix = f"If it fails: pip install 'async-grpo[{extra}]', in an environment of its own."
            yield warning(name, f"{have} (tested: {', '.join(map(str, wanted))})", fix)


def _against_tested(version_of: Installed) -> Finding:
    tested = tested_set()
    both = [(name, have, tested[canonicalize_name(name)]) for name in MAIN if (have := version_of(name))]
    others = [f"{name} {have} (tested: {pin})" for name, have, pin in both if Version(have).public != pin]
    if others:
        return warning("versions", f"not those that were tested: {', '.join(others)}", f"If it fails: {_INSTALL}")
    shown = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers", "trl"))
    return ok("versions", f"{len(both)} packages, all in the tested version: {shown}, ...")
