"""The doctor's checks on real GPUs: `pytest -m gpu tests/gpu/test_doctor_gpu.py -s` prints what it says."""

from __future__ import annotations

import pytest

from async_grpo.checks.doctor import finding, gpu
from async_grpo.checks.doctor.finding import Level

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if not gpu.driver().visible:
        pytest.skip("no GPU is visible")


def test_driver_torch_cupy_and_devices_are_judged() -> None:
    found = gpu.driver()
    assert found.cuda >= 12000 and found.version
    findings = [gpu.presence(found), *gpu.judged(found.cuda)]
    print("\n" + "\n".join(map(finding.line, findings)))
    assert len(findings) == 3 + found.visible
    assert not [finding for finding in findings if finding.level is Level.ERROR]


def test_weights_go_from_one_process_to_another_and_arrive_whole() -> None:
    names = [f"cuda:{index}" for index in range(min(2, gpu.driver().visible))]
    findings = list(gpu.weight_sharing(names))
    print("\n" + "\n".join(map(finding.line, findings)))
    assert len(findings) == len(names)
    assert all("every value arrived" in finding.found for finding in findings)
