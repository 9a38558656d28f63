"""The version of this package, and those of others."""

import platform
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


def versions(*packages: str) -> dict[str, str]:
    """The installed version of each package, empty where there is none, and Python's."""
    return {"Python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(name: str) -> str:
    if name == "async-grpo":
        return __version__
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
