"""The chain of versions on disk: a snapshot, and the exact difference from each version to the next.

`delta` is the difference of two versions and its file, `coding` that of one tensor, and `tensors` goes from torch's
tensors to their words and back. `chain` finds and reads the folder, and `writer` appends to it. `recorder` does so in a
thread of its own, with the versions of a parameter server, and `callback` with those of any transformers trainer.
`statistics` says what changed where, and draws it; `checkpoint` writes a version as a folder that transformers loads.
Start with `chain`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_grpo.deltas.callback import DeltaCallback as DeltaCallback


def __getattr__(name: str) -> Any:
    if name == "DeltaCallback":  # it imports transformers, which the readers of chains do not need
        from async_grpo.deltas.callback import DeltaCallback

        return DeltaCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
