"""Servers of OpenEnv environments, the template one too, and calls of their tools."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_grpo.telemetry.waiting import wait_until

TEMPLATE = Path(importlib.util.find_spec("openenv.cli").origin).parent / "templates" / "openenv_env"  # type: ignore[union-attr,arg-type]
NAMES = {
    "__ENV_NAME__": "echo_env",
    "__ENV_CLASS_NAME__": "Echo",
    "__ENV_TITLE_NAME__": "Echo",
    "max_concurrent_envs=1": "max_concurrent_envs=8",
}


def from_template(folder: Path) -> Path:
    """The package that `openenv init echo_env` writes; without the lock, which needs a network."""
    package = folder / "echo_env"
    shutil.copytree(TEMPLATE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*package.rglob("*.py")]:
        text = path.read_text()
        for name, value in NAMES.items():
            text = text.replace(name, value)
        path.with_name(path.name.replace("__ENV_NAME__", "echo_env")).write_text(text)
    return package


@contextmanager
def served(application: str, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", application, "--port", str(port)], cwd=folder, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: _answers(port, server, folder) or None, what="the OpenEnv server", timeout_s=120)
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.kill()
        server.wait()


def _answers(port: int, server: subprocess.Popen[bytes], folder: Path) -> bool:
    assert server.poll() is None, (folder / "server.log").read_text()
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def calls(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
