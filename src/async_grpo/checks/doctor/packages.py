"""Which packages are here, against the tested set and what we and they ask for. Imports none of them."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from importlib import metadata, resources, util

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from async_grpo.checks.doctor.finding import Finding, error, ok, warning
from async_grpo.version import __version__

ENGINES = ("vllm", "unsloth", "bitsandbytes")
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
    lines = _CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pins = (re.fullmatch(r"([\w.-]+)==(\S+)", line.strip()) for line in lines)
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def needed() -> list[Requirement]:
    """What Async-GRPO itself asks for, without extras; empty where it runs without being installed."""
    return _requirements("async-grpo")


def packages(version_of: Installed = installed) -> Iterator[Finding]:
    """The main packages: missing or out of range is an error, another version than tested a warning."""
    python = platform.python_version()
    yield ok("async-grpo", f"{__version__} on Python {python}, {platform.system()} {platform.release()}")
    for requirement in needed():
        have = version_of(requirement.name)
        if have is None:
            yield error(requirement.name, f"not installed; {requirement} is needed", _INSTALL)
        elif not requirement.specifier.contains(have, prereleases=True):
            yield error(requirement.name, f"{have}, but {requirement} is needed", _INSTALL)
    yield _against_tested(version_of)


def _against_tested(version_of: Installed) -> Finding:
    tested = tested_set()
    others, here = [], 0
    for name in MAIN:
        have, pinned = version_of(name), tested.get(canonicalize_name(name))
        if have is None or pinned is None:
            continue
        here += 1
        if Version(have).public != Version(pinned).public:
            others.append(f"{name} {have} (tested: {pinned})")
    if others:
        return warning("versions", f"not those that were tested: {', '.join(others)}", f"If it fails: {_INSTALL}")
    shown = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers", "trl"))
    return ok("versions", f"{here} packages, all in the tested version: {shown}, ...")


def engines(version_of: Installed = installed) -> Iterator[Finding]:
    """The optional engines: whether they are here, can be found, and get along with what else is here."""
    tested = tested_set()
    absent = [name for name in ENGINES if version_of(name) is None]
    if absent:
        yield ok("engines", f"not installed, and not needed: {', '.join(absent)}")
    for name in ENGINES:
        have = version_of(name)
        if have is None:
            continue
        if util.find_spec(name) is None:
            yield warning(
                name, f"{have} is listed as installed, but Python finds no module {name}", f"pip install {name}"
            )
        elif unmet := unmet_requirements(name, version_of):
            yield warning(
                name,
                f"{have} asks for other versions than there are: {', '.join(unmet)}",
                f"pip install -c {_CONSTRAINTS} 'async-grpo[{name}]', in an environment of its own if need be.",
            )
        else:
            pinned = tested.get(name)
            note = f" (tested: {pinned})" if pinned and pinned != have else ""
            yield ok(name, f"{have}{note}; found, not imported")


def unmet_requirements(name: str, version_of: Installed = installed) -> list[str]:
    """What an installed distribution asks for and does not get, of the main packages."""
    main = {canonicalize_name(package) for package in MAIN}
    return [
        f"{requirement.name}{requirement.specifier} (there is {have})"
        for requirement in _requirements(name)
        if canonicalize_name(requirement.name) in main
        and (have := version_of(requirement.name)) is not None
        and not requirement.specifier.contains(have, prereleases=True)
    ]


def _requirements(name: str) -> list[Requirement]:
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    every = map(Requirement, lines)
    return [each for each in every if each.marker is None or each.marker.evaluate({"extra": ""})]
