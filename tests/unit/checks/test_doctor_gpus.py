"""The doctor on GPUs: how many processes they admit, and what each process of its round trip sees."""

from __future__ import annotations

from typing import Any

import pytest

from async_grpo.checks import probe
from async_grpo.checks.doctor import gpu, weights
from async_grpo.checks.doctor.finding import Level
from async_grpo.checks.doctor.gpu import DriverReport


@pytest.mark.parametrize(("mode", "level"), [(3, Level.WARNING), (2, Level.ERROR)])
def test_a_gpu_that_does_not_admit_several_processes_is_named(mode: int, level: Level) -> None:
    driver = DriverReport(version="580", cuda=13000, visible=2, compute_modes=(0, mode))
    [found] = gpu.modes(driver, {})
    assert (found.subject, found.level) == ("GPU 1", level)
    assert "nvidia-smi -i 1 -c DEFAULT" in found.fix
    [found] = gpu.modes(driver, {"CUDA_VISIBLE_DEVICES": "4,GPU-5f"})
    assert "nvidia-smi -i GPU-5f -c DEFAULT" in found.fix, "which has numbers of its own"


def test_writer_and_reader_see_their_own_gpu_alone_as_server_and_worker_do(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[dict[str, Any], str]] = []

    def ask(module: str, question: dict[str, Any], *, timeout_s: float, env: dict[str, str]) -> dict[str, Any]:
        asked.append((question, env["CUDA_VISIBLE_DEVICES"]))
        return {"equal": True, "read_gbps": 1.0, "memory": "cuda"}

    monkeypatch.setattr(probe, "ask", ask)
    monkeypatch.setattr(weights, "why_unreachable", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert [finding.level for finding in weights.weight_sharing(["cuda:0", "cuda:1"])] == [Level.OK] * 2
    assert [(question["reader_sees"], sees) for question, sees in asked] == [
        ({"CUDA_VISIBLE_DEVICES": "4"}, "4"),
        ({"CUDA_VISIBLE_DEVICES": "5"}, "4"),
    ]
    assert {(question["writer"], question["reader"]) for question, _ in asked} == {("cuda:0", "cuda:0")}


def test_gpus_that_are_no_peers_are_tried_in_the_way_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--weights auto` goes through host memory there, so it is no error that CUDA IPC does not work."""

    def ask(module: str, question: dict[str, Any], **_: Any) -> dict[str, Any]:
        if question["way"] != "host":
            raise probe.ChildFailed("ended with 1", ["cudaErrorPeerAccessUnsupported"])
        return {"equal": True, "read_gbps": 1.0, "memory": "posix"}

    monkeypatch.setattr(probe, "ask", ask)
    monkeypatch.setattr(weights, "why_unreachable", lambda *_: "GPU 1 cannot map memory of GPU 0 (no peers)")
    for found in weights.weight_sharing(["cuda:0", "cuda:1"]):
        assert found.level is Level.WARNING, "the server's own GPU is tried as well"
        assert "every value arrived" in found.found and "GPU 1 cannot map memory of GPU 0" in found.found
