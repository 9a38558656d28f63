"""A model whose versions are kept."""

from __future__ import annotations

from pathlib import Path

from torch import nn


class Saving:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "config.json").write_text("{}")


class Model(nn.Module):
    """One frozen and two trained matrices, and what `save_pretrained` of a model is asked for."""

    config = Saving()

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.embed.requires_grad_(False)
