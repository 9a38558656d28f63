from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from async_grpo_ipc import WeightExporter, open_remote_memory


class TinyModel(nn.Module):
    """Two dtypes, a tied head, a scalar, an empty and a permuted parameter, a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.scale = nn.Parameter(torch.empty(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.permuted = nn.Parameter(torch.empty(3, 5).t())
        self.low_precision = nn.Parameter(torch.empty(7, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.tensor([seed], dtype=torch.int64))
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        self.head.weight = self.embed.weight


@pytest.fixture
def handle(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ps_ipc_handle.json"


@pytest.fixture
def tiny() -> Callable[[int], TinyModel]:
    return TinyModel


@pytest.fixture
def trainer() -> TinyModel:
    return TinyModel(seed=1)


@pytest.fixture
def exporter(trainer: TinyModel, handle: Path):
    with WeightExporter.from_model(trainer, handle, buffers=True) as exporter:
        yield exporter


@pytest.fixture
def published(exporter: WeightExporter) -> WeightExporter:
    """An exporter of version 1."""
    exporter.publish(1)
    return exporter


@pytest.fixture
def remote(published: WeightExporter, handle: Path):
    """A reader of version 1."""
    with open_remote_memory(handle) as remote:
        yield remote


@pytest.fixture
def model() -> TinyModel:
    """A reader's model, of other weights than the trainer's."""
    return TinyModel(seed=2)
