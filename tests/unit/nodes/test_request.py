"""What `--ray` refuses before anything starts, and what of a project travels to nodes."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import UsageError
from async_grpo.nodes import cluster, request, tree
from async_grpo.nodes.request import check_request, require_ray
from async_grpo.nodes.tree import packed, unpack
from async_grpo.rundir.run_plan import RunPlan, TRLCall
from async_grpo.settings import LaunchSettings, WorkerSettings


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "parts").mkdir(parents=True)
    (folder / "setup.py").write_text("import parts.rewards\n")
    (folder / "parts" / "rewards.py").write_text("")
    return folder


def names(config: Path) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(packed(config))) as tar:
        return set(tar.getnames())


@pytest.mark.parametrize(
    ("found", "words"),
    [(None, r"pip install 'async-grpo\[ray\]'"), ("2.61.0", "needs Ray 2.60, and 2.61.0 is installed"), ("2.60.1", "")],
)
def test_the_version_of_ray(found: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(request, "version", version)
    with pytest.raises(UsageError, match=words) if words else nullcontext():
        require_ray()


@pytest.mark.parametrize(
    ("launch", "plan", "env", "words"),
    [
        ({"ray": "somewhere"}, {}, {}, "must be auto, local or HOST:PORT, got 'somewhere'"),
        ({"ray": "local"}, {}, {}, "say of how many nodes, --nodes 2 or more"),
        ({"ray": "auto", "nodes": 1}, {}, {}, "leaves nobody to generate"),
        ({"ray": "auto"}, {}, {"ASYNC_GRPO_FUNCTION": "3"}, "write it into a file"),
        ({"ray": "auto"}, {"trl": TRLCall([], ".")}, {}, "async-grpo init"),
        ({"ray": "auto"}, {"work": WorkerSettings(server_devices="1")}, {}, "--server-devices names GPUs of this"),
        ({"ray": "local", "nodes": 3, "trainer_nodes": 3}, {}, {}, "--trainer-nodes 3: --ray local is of this machine"),
        ({"ray": "auto", "trainer_nodes": 2, "machine_rank": 0}, {}, {}, "Leave out --machine-rank"),
        ({"ray": "auto", "trainer_nodes": 2}, {}, {}, "has num_machines: 1. Give both the same number"),
        ({"ray": "gpu1:6379"}, {}, {}, ""),
    ],
)
def test_what_cannot_be_is_refused(
    launch: dict[str, Any],
    plan: dict[str, Any],
    env: dict[str, str],
    words: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request, "require_ray", lambda: None)
    asked = RunPlan(config=project / "setup.py", launch=LaunchSettings(**launch), **plan)
    with pytest.raises(UsageError, match=words) if words else nullcontext():
        check_request(asked, env)


def test_a_project_travels_without_runs_checkpoints_and_hidden_files(project: Path) -> None:
    for other, mark in (("worker", "run.json"), ("out", "trainer_state.json"), ("env", "pyvenv.cfg")):
        (project / other).mkdir()
        (project / other / mark).write_text("{}")
    (project / ".secret").write_text("")
    (project / "parts" / "__pycache__").mkdir()
    (project / "parts" / "__pycache__" / "x.pyc").write_text("")
    (project / "link.py").symlink_to("/etc/hostname")
    assert names(project / "setup.py") == {"setup.py", "parts/rewards.py"}


def test_what_git_ignores_stays_and_so_do_hidden_files_that_it_does_not_ignore(project: Path) -> None:
    subprocess.run(["git", "-C", str(project), "init", "-q"], check=True)
    (project / ".gitignore").write_text("*.bin\nsetup.py\n")
    (project / "parts" / ".cache").mkdir()
    for left_out in ("data.bin", ".env", "parts/.cache/token"):
        (project / left_out).write_bytes(b"x")
    assert names(project / "setup.py") == {"setup.py", "parts/rewards.py"}


def test_the_folder_of_ray_has_a_new_name_and_what_is_not_ours_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SHORT", str(tmp_path))
    (tmp_path / "kept").mkdir()
    (link := tmp_path / "agrpo-run-link").symlink_to(tmp_path / "kept")
    killed, again = (cluster._folder_for("run") for _ in range(2))
    assert again != killed and not killed.exists() and again.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: again.stat().st_uid + 1)
    assert cluster._folder_for("run") != again and again.exists()
    assert link.is_symlink() and (tmp_path / "kept").exists()


def test_a_large_project_is_refused_with_the_way_out(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MOST_BYTES", 1000)
    (project / "data.csv").write_bytes(b"x" * 2000)
    with pytest.raises(UsageError, match=r"has more than 1.0 kB: .* \.gitignore"):
        packed(project / "setup.py")


def test_a_project_arrives_as_it_was_and_nothing_outside_it(project: Path, tmp_path: Path) -> None:
    unpack(packed(project / "setup.py"), tmp_path / "there")
    assert (tmp_path / "there" / "setup.py").read_text() == "import parts.rewards\n"
    hostile = io.BytesIO()
    with tarfile.open(fileobj=hostile, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../outside"))
    with pytest.raises(tarfile.OutsideDestinationError):
        unpack(hostile.getvalue(), tmp_path / "again")
