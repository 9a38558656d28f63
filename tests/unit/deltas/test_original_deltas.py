"""The files of the original: read as data, refused when they are anything else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_grpo.cli import main
from async_grpo.deltas.original import apply_original, read_original
from async_grpo.errors import BadFileError, DeltaChainError


def original(step: int, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], *, values: bool) -> dict[str, Any]:
    """What the original wrote: as `values`, or as differences in bf16."""
    layers = {}
    for name in old:
        indices = (old[name] != new[name]).nonzero().T.to(torch.int32)
        where = tuple(indices.long())
        change = new[name][where] if values else (new[name].float() - old[name].float())[where].to(torch.bfloat16)
        layers[name] = {"indices": indices, "values": change, "shape": list(old[name].shape), "nnz": indices.shape[1]}
    return {"step": step, "timestamp": 1.5, "layers": layers, "metadata": {"format": "values"} if values else {}}


def two_versions() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    old = {"q.weight": torch.randn(6, 5).bfloat16(), "norm.weight": torch.ones(7).bfloat16()}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["q.weight"][1, 2], new["q.weight"][5, 4], new["norm.weight"][3] = 0.25, -3.0, 1.5
    return old, new


@pytest.mark.parametrize("values", [True, False])
def test_a_file_of_the_original_is_applied(values: bool, tmp_path: Path) -> None:
    old, new = two_versions()
    torch.save(original(3, old, new, values=values), tmp_path / "delta_000003.pt")
    delta = read_original(tmp_path / "delta_000003.pt")
    before = {name: tensor.clone() for name, tensor in old.items()}
    found = apply_original(delta, old)
    assert (delta.step, delta.changed, delta.is_exact) == (3, 3, values)
    assert all(torch.allclose(found[name].float(), new[name].float(), rtol=0.01) for name in new)
    assert not values or all(torch.equal(found[name], new[name]) for name in new)
    assert all(torch.equal(old[name], before[name]) for name in old)  # the original wrote into the caller's


def test_the_command_rebuilds_from_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = two_versions()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    save_file(old, tmp_path / "base" / "model.safetensors")
    (tmp_path / "deltas").mkdir()
    torch.save(original(1, old, new, values=True), tmp_path / "deltas" / "delta_000001.pt")
    asked = ["delta", "rebuild", tmp_path / "deltas", "--base", tmp_path / "base", "--output", tmp_path / "out"]
    assert main(list(map(str, asked))) == 0
    assert "no hash to compare" in capsys.readouterr().out
    assert all(torch.equal(tensor, new[name]) for name, tensor in load_file(tmp_path / "out/model.safetensors").items())
    for step in (2, 4):
        torch.save(original(step, old, new, values=True), tmp_path / "deltas" / f"delta_00000{step}.pt")
    asked[-1] = tmp_path / "again"
    assert main(list(map(str, asked))) == 2
    assert "no delta of step 3" in capsys.readouterr().err and not (tmp_path / "again").exists()
    assert main([*map(str, asked), "--step", "2"]) == 0


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    old, new = two_versions()
    for payload in (Hostile(ran), {**original(1, old, new, values=True), "extra": Hostile(ran)}):
        torch.save(payload, tmp_path / "delta_000001.pt")
        with pytest.raises(BadFileError, match=r"delta_000001.pt cannot be used: torch refuses it"):
            read_original(tmp_path / "delta_000001.pt")
    (tmp_path / "delta_000001.pt").write_bytes(pickle.dumps(Hostile(ran)))
    with pytest.raises(BadFileError):
        read_original(tmp_path / "delta_000001.pt")
    assert not ran.exists()


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {"step": 1},
        {"step": 1, "layers": {"w": {"indices": torch.zeros(2, 3), "values": torch.zeros(3), "shape": [4, 4]}}},
        {"step": 1, "layers": {"w": {"indices": torch.zeros(1, 3).int(), "values": torch.zeros(3), "shape": [4, 4]}}},
        {"step": 2, "layers": {}},
    ],
)
def test_what_is_no_delta_is_refused(broken: Any, tmp_path: Path) -> None:
    torch.save(broken, tmp_path / "delta_000001.pt")
    with pytest.raises(BadFileError):
        read_original(tmp_path / "delta_000001.pt")


def test_changes_outside_of_a_tensor_are_refused(tmp_path: Path) -> None:
    old, new = two_versions()
    found = original(1, old, new, values=True)
    found["layers"]["q.weight"]["indices"][0, 0] = 6
    torch.save(found, tmp_path / "delta_000001.pt")
    with pytest.raises(DeltaChainError, match=r"changes elements of q\.weight"):
        apply_original(read_original(tmp_path / "delta_000001.pt"), old)
    with pytest.raises(DeltaChainError, match=r"changes q.weight \[6, 5\], which is not there"):
        apply_original(read_original(tmp_path / "delta_000001.pt"), {"norm.weight": old["norm.weight"]})
