"""Tensors shared between processes without copies: published once, mapped by any number of readers.

    with WeightExporter.from_model(model, "run/handle.json") as exporter:      # the process that trains
        exporter.publish(version=1)

    with open_remote_memory("run/handle.json", timeout_s=60) as remote:  # any other process here
        remote.alias(model)       # parameters become views of the newest version: no copy
        remote.refresh()          # the same, moved on
        remote.pull(other_model)  # or copied into memory of its own

docs/ipc.md has the protocol, the file format, and the guarantees when a process dies.
"""

import importlib
from typing import TYPE_CHECKING, Any

from async_grpo_ipc.errors import (
    AttachError,
    ExporterAliveError,
    ExporterDiedError,
    ForkedError,
    HandleFileError,
    HeaderError,
    IPCError,
    MismatchError,
    NoRoomError,
    ShareTimeoutError,
    VersionGoneError,
)

if TYPE_CHECKING:
    from async_grpo_ipc.exporter import WeightExporter
    from async_grpo_ipc.handle import handle_path
    from async_grpo_ipc.model import flatten_parameters
    from async_grpo_ipc.remote import RemoteWeights, WeightsView, open_remote_memory
    from async_grpo_ipc.sources import Blueprint
    from async_grpo_ipc.vllm_feed import FeedError, VLLMFeed

__all__ = [
    "AttachError",
    "Blueprint",
    "ExporterAliveError",
    "ExporterDiedError",
    "FeedError",
    "ForkedError",
    "HandleFileError",
    "HeaderError",
    "IPCError",
    "MismatchError",
    "NoRoomError",
    "RemoteWeights",
    "ShareTimeoutError",
    "VLLMFeed",
    "VersionGoneError",
    "WeightExporter",
    "WeightsView",
    "flatten_parameters",
    "handle_path",
    "open_remote_memory",
]

# Imported when first used: torch takes seconds, and `python -m async_grpo_ipc --help` should not.
_HOMES = {
    "Blueprint": "sources",
    "FeedError": "vllm_feed",
    "RemoteWeights": "remote",
    "VLLMFeed": "vllm_feed",
    "WeightExporter": "exporter",
    "WeightsView": "remote",
    "flatten_parameters": "model",
    "handle_path": "handle",
    "open_remote_memory": "remote",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
