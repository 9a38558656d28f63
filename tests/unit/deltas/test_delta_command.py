"""`async-grpo delta`: what a person types, on a chain in a folder and on one that a run names."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from delta_chains import equal, weights, write_chain
from matplotlib.figure import Figure
from safetensors.numpy import load_file

from async_grpo.cli import main
from async_grpo.deltas import checkpoint
from async_grpo.deltas.chain import kept_of, named_version
from async_grpo.deltas.statistics import kind_of, layer_of
from async_grpo.errors import DeltaChainError
from async_grpo.rundir.paths import RunDir
from kit.archived_run import three_steps
from kit.commands import Says


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return write_chain(tmp_path / "chain", 10)


def test_verify_says_up_to_where_a_chain_is_intact(chain: Path, printed: Says) -> None:
    assert "intact: 11 versions rebuilt" in printed("delta", "verify", chain)
    (chain / "000006.delta").unlink()
    said = printed("delta", "verify", chain, "--json", chain / "found.json", code=1)
    assert "broken: 000007.delta: it starts from version 6, whose file is missing" in said
    assert "intact up to version 5, and again 3 versions from 8 to 10" in said
    assert json.loads((chain / "found.json").read_text())["up_to"] == 5


def test_rebuild_writes_the_newest_or_the_version_asked_for(chain: Path, tmp_path: Path, refused: Says) -> None:
    for options, version in (([], 10), (["--step", "3"], 3)):
        folder = tmp_path / f"rebuilt-{version}"
        assert main(["delta", "rebuild", str(chain), "--output", str(folder), *options]) == 0
        tensors = load_file(folder / "model.safetensors")
        assert equal({name: tensor.view(np.uint32) for name, tensor in tensors.items()}, weights(version))
    assert "exists already" in refused("delta", "rebuild", chain, "--output", str(tmp_path / "rebuilt-3"))


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/etc/hostname")], ids=["pipe", "link"])
def test_a_rebuild_copies_no_pipe_and_follows_no_link(
    chain: Path, tmp_path: Path, plant: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A link in a chain of somebody else may lead to what is not to be in a checkpoint."""
    (chain / "model" / "chat_templates").mkdir(parents=True)
    (chain / "model" / "chat_templates" / "tool.jinja").write_text("{{ messages }}")
    assert main(["delta", "rebuild", str(chain), "--output", str(tmp_path / "rebuilt")]) == 0
    assert (tmp_path / "rebuilt" / "chat_templates" / "tool.jinja").read_text() == "{{ messages }}"
    plant(chain / "model" / "config.json")
    assert main(["delta", "rebuild", str(chain), "--output", str(tmp_path / "other")]) == 1
    assert f"error: {chain}/model/config.json cannot be used" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chain", "rebuilt"]


def test_a_rebuild_without_room_leaves_no_half_checkpoint(
    chain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "save_file", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert main(["delta", "rebuild", str(chain), "--output", str(tmp_path / "new" / "rebuilt")]) == 1
    assert "The disk is full: no room for" in capsys.readouterr().err
    assert not [*(tmp_path / "new").iterdir()]


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.path,)


def test_files_that_others_pickled_are_refused_and_not_opened(
    chain: Path, tmp_path: Path, refused: Says, printed: Says
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "delta_000001.pt").write_bytes(bomb)
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "delta_000001.pt"):
        assert f"{path} is neither a chain of deltas nor a run directory" in refused("delta", "rebuild", path)
    (chain / "000006.delta").write_bytes(bomb)
    assert "broken: 000006.delta: it is not a delta" in printed("delta", "verify", chain, code=1)
    assert not (tmp_path / "ran").exists()


def test_stats_and_diff_count_what_changed(chain: Path, printed: Says) -> None:
    old, new = weights(4), weights(5)
    by_hand = {name: (old[name] != new[name]).mean() for name in old}
    assert main(["delta", "stats", str(chain), "--over", "2,3", "--json", str(chain / "s.json")]) == 0
    figures = json.loads((chain / "s.json").read_text())
    step = next(step for step in figures["steps"] if step["version"] == 5)
    assert step["by_layer"] == {
        "0": by_hand["model.layers.0.self_attn.q_proj.weight"],
        "1": by_hand["model.layers.1.mlp.up_proj.weight"],
        "rest": by_hand["model.norm.weight"],
    }
    assert step["by_kind"].keys() == {"q_proj", "up_proj", "norm"}
    assert 0 < step["jaccard"] < 0.5
    pairs = [(weights(v), weights(v + 2)) for v in range(0, 10, 2)]
    same = [sum((a[n] == b[n]).sum() for n in a) / 600 for a, b in pairs]
    assert figures["unchanged_over"]["2"] == pytest.approx(sum(same) / len(same))
    said = printed("delta", "diff", chain, "4", "5")
    changed = sum(int((old[name] != new[name]).sum()) for name in old)
    assert f"version 4 to 5: {changed} of 600 elements differ" in said


def test_a_picture_has_a_row_for_each_layer_and_kind(
    chain: Path, printed: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    said = printed("delta", "stats", chain, "--plot", chain / "map.svg")
    assert "map.svg: a heat map of 3 rows and 10 versions" in said
    rows = [[label.get_text() for label in axes.get_yticklabels()] for axes in drawn[0].axes[:2]]
    assert rows == [["0", "1", "rest"], ["q_proj", "up_proj", "norm"]]


@pytest.mark.slow  # seconds
def test_a_picture_is_drawn(chain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["delta", "stats", str(chain), "--plot", str(chain / "map.svg")]) == 0
    picture = (chain / "map.svg").read_text()
    assert picture.startswith("<?xml") and len(picture) > 10_000
    assert "map.svg: a heat map of 3 rows and 10 versions" in capsys.readouterr().out


def test_a_run_directory_names_its_chain(chain: Path, tmp_path: Path) -> None:
    run = three_steps(tmp_path / "run")
    with pytest.raises(DeltaChainError, match="kept no versions"):
        named_version(f"{run.root}@3")
    RunDir(run.root).update_state(delta_dir=str(chain))
    assert named_version(f"{run.root}@3") == (chain, 3)
    assert named_version(f"{chain}@3") == (chain, 3)
    assert named_version("Qwen/Qwen3-0.6B") is None and named_version(str(run.root)) is None
    assert main(["delta", "verify", str(run.root)]) == 0
    assert kept_of(run.root, [3, 4, 99]).endswith(f"{run.root}@4 --config SETUP_FILE")
    spaced = run.root.rename(tmp_path / "my run")
    assert shlex.split(kept_of(spaced, [3]))[-3:] == [f"{spaced}@3", "--config", "SETUP_FILE"], "to copy and run"
    spaced.rename(run.root)
    assert kept_of(run.root, [99]) == kept_of(tmp_path, [3]) == ""
    chain.rename(tmp_path / "moved")
    with pytest.raises(DeltaChainError, match="was it moved"):
        named_version(f"{run.root}@3")


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("model.layers.12.mlp.down_proj.weight", "12", "down_proj"),
        ("transformer.h.3.attn.c_attn.bias", "3", "c_attn.bias"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", "0", "q_proj.lora_A"),
        ("model.embed_tokens.weight", "embeddings", "embed_tokens"),
        ("lm_head.weight", "rest", "lm_head"),
    ],
)
def test_layers_and_kinds_of_matrices(name: str, layer: str, kind: str) -> None:
    assert (layer_of(name), kind_of(name)) == (layer, kind)


@pytest.mark.parametrize("kept", ["versions", "none yet", ""])
def test_a_run_directory_is_no_model_to_evaluate(kept: str, chain: Path, tmp_path: Path, refused: Says) -> None:
    run = three_steps(tmp_path)
    if kept == "none yet":
        chain = shutil.copytree(chain, tmp_path / "began", ignore=lambda _, names: {*names} - {"chain.json"})
    if kept:
        RunDir(run.root).update_state(delta_dir=str(chain))
    setup = tmp_path / "setup.py"
    setup.write_text("def get_trainer():\n    raise AssertionError\n")
    said = refused("evaluate", run.root, "--config", setup, "--run-dir", tmp_path / "evaluation")
    if kept == "versions":
        assert f"is a run directory. Name one of the versions that it kept, such as {run.root}@10" in said
    elif kept:
        assert "is a run directory. It kept none yet." in said
    else:
        assert "kept no versions" in said and "its checkpoints are in" in said
