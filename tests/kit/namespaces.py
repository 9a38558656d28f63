"""Two machines as far as the network goes: network namespaces with nothing but a link between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.43.0.1", "10.43.0.2")


def why_no_namespaces() -> str:
    """Why there can be none here, or ""."""
    return "network namespaces need root, and `ip` of iproute2" if os.geteuid() or not shutil.which("ip") else ""


@contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Their names. Each has one of `ADDRESSES` on its eth0, until the end of the block."""
    names = (f"trainer0-{os.getpid()}", f"trainer1-{os.getpid()}")

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
