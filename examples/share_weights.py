"""Two processes share a model: one trains it, the other runs it, and no weight is copied between them.

In two terminals, in any order: `python examples/share_weights.py train`, `python examples/share_weights.py run`.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

from async_grpo_ipc import ExporterDiedError, WeightExporter, open_remote_memory

HANDLE = Path("share_weights_run/handle.json")


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))


def train(steps: int = 400) -> None:
    """Learn the sine, and publish the weights after every step."""
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with WeightExporter.from_model(model, HANDLE) as exporter:
        for step in range(1, steps + 1):
            x = torch.rand(256, 1) * 6 - 3
            loss = (model(x) - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            exporter.publish(version=step)  # False, and no wait, where a reader holds every other slot
            time.sleep(0.02)
        print(f"trained {steps} steps, {exporter.skipped} versions were skipped for a reader")


def run() -> None:
    """Print the newest weights' value of sin(1), until the trainer ends."""
    with torch.device("meta"):
        model = build_model()  # no memory of its own: it gets the trainer's
    with open_remote_memory(HANDLE, timeout_s=60) as remote:
        version = remote.alias(model)
        while remote.exporter_alive():
            with torch.no_grad():
                print(f"version {version:>3}: sin(1) = {model(torch.ones(1, 1)).item():.3f}, should be 0.841")
            remote.release()  # idle: the trainer may have the slot
            time.sleep(0.5)
            version = remote.refresh()  # only swaps pointers


if __name__ == "__main__":
    try:
        {"train": train, "run": run}[sys.argv[1]]()
    except (KeyError, IndexError):
        sys.exit(__doc__)
    except (ExporterDiedError, KeyboardInterrupt) as error:
        sys.exit(str(error))
