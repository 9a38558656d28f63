"""Several processes on one GPU: torn reads, aliasing workers, a frozen base, a dead exporter, isolation.

What needs no GPU of these also runs with GPU_TESTS_DEVICE=cpu (on_device.py).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from on_device import DEVICE, ON_CPU, Actor, counting_tensors, need_device, stack, synchronize

from async_grpo_ipc import WeightExporter, open_remote_memory

pytestmark = pytest.mark.gpu
MIB = 1 << 20
TORN_S = 2.0 if ON_CPU else 20.0
needs_gpu = pytest.mark.skipif(ON_CPU, reason="needs a GPU")
HELD = """
import argparse, json, os, sys
from async_grpo.cli import options
from async_grpo.setup.devices import choose_device
device = choose_device(sys.argv[1])
options.become_role(argparse.Namespace(log_level="ERROR", launched_by=None), device, fast_inference="0")
import torch
here = torch.cuda.is_available()
uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())] if here else []
computed = str((torch.ones(2, device="cuda" if here else "cpu") * 2).device)
print(json.dumps({"available": here, "uuids": uuids, "computed": computed}))
"""


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    need_device()
    yield
    if not ON_CPU:
        torch.cuda.empty_cache()  # the processes of the next test need room


def test_no_read_is_torn_under_load(tmp_path: Path) -> None:
    """One publisher without a pause, three readers in processes of their own; every element is its version."""
    handle = tmp_path / "handle.json"
    tensors = counting_tensors()
    with WeightExporter.from_tensors(tensors, handle, slots=3) as exporter:
        exporter.publish(0)
        readers = [Actor("read_counting", handle, way, TORN_S) for way in ("alias", "alias", "pull")]
        published = skipped = 0
        for version in itertools.count(1):
            for tensor in tensors.values():
                tensor.fill_(float(version))
            if exporter.publish(version):
                published += 1
            else:
                skipped += 1
            if all(reader.process.poll() is not None for reader in readers):
                break
            assert version < 1 << 24, "exact in fp32"
        found = [reader.answer() for reader in readers]
    print(f"{published} versions published, {skipped} skipped; readers: {found}")
    assert all(one["reads"] > 3 and one["last"] > 0 for one in found)
    assert [(one["torn"], one["backwards"]) for one in found] == [(0, 0)] * 3


def test_the_static_block_of_lora_is_there_once_and_for_all_processes(tmp_path: Path) -> None:
    handle, layers, width = tmp_path / "handle.json", 8, 256 if ON_CPU else 2048
    model = stack(layers, width, frozen=layers - 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    synchronize()
    before = 0 if ON_CPU else torch.cuda.memory_allocated()
    with WeightExporter.from_model(model, handle, share_frozen=True) as exporter:
        exporter.publish(1)
        if not ON_CPU:
            frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
            assert before - torch.cuda.memory_allocated() >= 0.9 * frozen, "torch has the base no more"
        with Actor("alias_from_loaded", handle, layers, width) as worker:
            answer = worker.answer()
        assert (answer["version"], answer["values"]) == (1, [3.0])
    assert all(bool((parameter == 3.0).all()) for parameter in model.parameters()), "after the exporter's end, too"


@needs_gpu
def test_four_workers_at_the_same_time_take_next_to_no_memory(tmp_path: Path) -> None:
    """From a loaded model, as real workers: what they had loaded is given back."""
    handle, layers, width = tmp_path / "handle.json", 64, 2048
    model = stack(layers, width)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with WeightExporter.from_model(model, handle) as exporter:
        exporter.publish(1)
        workers = [Actor("alias_from_loaded", handle, layers, width) for _ in range(4)]
        answers = [worker.answer() for worker in workers]
        print(f"model {nbytes / MIB:.0f} MiB; of each worker (MiB), loaded and then aliased:")
        print([(round(a["loaded"] / MIB), round(a["aliased"] / MIB)) for a in answers])
        print(memory_by_process())
        for worker in workers:
            worker.__exit__()
    assert all(answer["version"] == 1 and answer["loaded"] >= nbytes for answer in answers)
    assert max(answer["aliased"] for answer in answers) <= 0.03 * nbytes + 2 * MIB


def memory_by_process() -> str:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    ran = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return f"nvidia-smi by process: {ran.stdout.split(chr(10))}"


@needs_gpu
def test_a_nearly_full_gpu_has_fewer_versions_and_a_full_one_none(tmp_path: Path) -> None:
    """With no room for two, the weights are published in host memory; a reader gets them either way."""
    tensors = counting_tensors()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    of_a_reader = empty(1600 * MIB)  # its context and its model
    ballast = empty(torch.cuda.mem_get_info()[0] - 10 * nbytes)
    some, none = tmp_path / "some.json", tmp_path / "none.json"
    with WeightExporter.from_tensors(tensors, some, slots=40) as exporter:
        memory = json.loads(some.read_text())["memory"]
        assert memory["kind"] == "cuda" and 2 < len(memory["blocks"]) < 40
        del of_a_reader
        expect_whole(exporter, some)
    of_a_reader = empty(torch.cuda.mem_get_info()[0] - nbytes - 32 * MIB)
    with WeightExporter.from_tensors(tensors, none, slots=2) as exporter:
        assert json.loads(none.read_text())["memory"]["kind"] == "posix", "there is room for one"
        del of_a_reader
        expect_whole(exporter, none)
    assert ballast.numel()


def empty(nbytes: int) -> torch.Tensor:
    torch.cuda.empty_cache()
    return torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)


def expect_whole(exporter: WeightExporter, handle: Path) -> None:
    torch.cuda.empty_cache()
    exporter.publish(0)
    with Actor("read_counting", handle, "pull", 1) as reader:
        assert reader.answer()["torn"] == 0


@needs_gpu
def test_memory_that_torch_only_keeps_is_used_before_giving_up(tmp_path: Path) -> None:
    tensors = counting_tensors()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    kept = torch.empty(torch.cuda.mem_get_info()[0] - nbytes, dtype=torch.uint8, device=DEVICE)
    del kept  # torch's cache has it
    with WeightExporter.from_tensors(tensors, tmp_path / "handle.json", slots=3, way="ipc") as exporter:
        assert exporter.publish(1)


def test_a_reader_of_a_dead_exporter_in_a_process_of_its_own(tmp_path: Path) -> None:
    """What the memory shows then is printed; NVIDIA does not document it, and the package never believes it."""
    handle = tmp_path / "handle.json"
    with Actor("export_and_stay", handle, 5) as exporter:
        kind = exporter.answer()["kind"]
        with Actor("read_when_told", handle) as reader:
            assert reader.answer()["version"] == 5
            assert reader.ask("look")["wrong"] == 0
            exporter.process.kill()
            exporter.process.wait(60)
            time.sleep(0.5)
            try:
                after = reader.ask("look")
            except AssertionError as error:
                after = {"ended": str(error)}
            print(f"after the exporter's death ({kind}): {after}")
            assert ON_CPU or after.get("refresh") != "refreshed"


@pytest.mark.parametrize("device", ["cpu", *map(str, range(0 if ON_CPU else torch.cuda.device_count()))])
def test_isolation_of_a_role(device: str, tmp_path: Path) -> None:
    """`--device cpu` leaves no CUDA, and a role on GPU i sees and computes on GPU i alone."""
    ran = subprocess.run(
        [sys.executable, "-c", HELD, device], env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout.splitlines()[-1])
    if device == "cpu":
        assert answer == {"available": False, "uuids": [], "computed": "cpu"}
    else:
        own = str(torch.cuda.get_device_properties(int(device)).uuid)
        assert answer == {"available": True, "uuids": [own], "computed": "cuda:0"}


def test_the_exporters_own_process_reads_it(tmp_path: Path) -> None:
    model, other = stack(2, 64), stack(2, 64)
    with WeightExporter.from_model(model, tmp_path / "handle.json") as exporter:
        exporter.publish(1)
        with open_remote_memory(tmp_path / "handle.json", device=DEVICE) as remote:
            remote.pull(other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
