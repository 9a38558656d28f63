"""GPUs of an experiment's stages: several for one, what the driver says of them, and what is packed by it."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from experiment_yard import ExperimentYard, tree

from async_grpo.errors import UsageError
from async_grpo.launch import supervisor as supervisor_module
from async_grpo_experiments.runner import experiment, peaks
from async_grpo_experiments.runner.config import checked
from async_grpo_experiments.runner.graph import graph_of, kind_of
from async_grpo_experiments.runner.peaks import BatchMemory, MemoryPeaks, StageForecast, way_out
from async_grpo_experiments.slots import foreground, gpu_usage
from async_grpo_experiments.slots.ledger import FAILED, LEDGER, read
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.slots.schedule import OUT_OF_MEMORY

GB = 10**9
TWO_GPUS = [Place(name="gpu0", gpus=("0",)), Place(name="gpu1", gpus=("1",))]
ONE_ROUND = tree(algos={"QSharp": {}}, rounds_of_training=1)
TRAIN, GENERATE = "QSharp_tiny_sums_r1.train", "QSharp_tiny_sums_r1.generate"


class FakeDriver:
    """The functions of pynvml that we call: GPUs of 80 GB, which use more memory each time that they are asked."""

    class NVMLError(Exception): ...

    def __init__(self) -> None:
        self.used = 10 * GB

    def nvmlInit(self) -> None:
        return None

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=80 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        self.used += GB
        return SimpleNamespace(used=self.used, total=80 * GB)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    found = FakeDriver()
    monkeypatch.setattr(gpu_usage, "_driver", lambda: found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return found


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentYard:
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.005)
    monkeypatch.setattr(peaks, "SAMPLE_S", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return ExperimentYard(tmp_path)


def seen_by(yard: ExperimentYard) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each stage, as `run.log` has it."""
    return dict(re.findall(r"(\S+) on \S+, CUDA_VISIBLE_DEVICES='(.*)'", (yard.root / "run.log").read_text()))


def test_a_stage_gets_several_gpus_as_one_place(yard: ExperimentYard) -> None:
    assert yard.run({**ONE_ROUND, "system": {"gpus_per_job": 2}}, places=TWO_GPUS) == 0
    assert {*seen_by(yard).values()} == {"0,1"}


def test_generation_takes_the_gpus_that_nothing_else_waits_for(yard: ExperimentYard) -> None:
    alone = {**ONE_ROUND, "algos": {"QSharp": {}}}
    yard.run(alone, places=TWO_GPUS, only="reference_tiny_sums")  # it waits no more
    assert yard.run(alone, places=TWO_GPUS) == 0
    seen = seen_by(yard)
    assert (seen[GENERATE], seen[TRAIN]) == ("0,1", "0")


def test_more_gpus_than_there_are_are_refused(yard: ExperimentYard) -> None:
    with pytest.raises(UsageError, match="needs 3 places at once, and there are 2"):
        yard.run({**ONE_ROUND, "algos": {"QSharp": {}}, "system": {"gpus_per_job": 3}}, places=TWO_GPUS)


def test_a_training_on_several_gpus_is_started_by_accelerate(tmp_path: Path) -> None:
    graph = graph_of(checked(tree(algos={"QSharp": {}, "GRPO": {}})))

    def command(name: str) -> list[str]:
        return experiment.ranks_command(2, tmp_path, graph[name], "token")

    launched = " ".join(command(TRAIN))
    assert "-Pm accelerate.commands.launch --num_processes 2 " in launched
    assert launched.endswith(f"-Pm async_grpo_experiments.runner.stages {tmp_path} QSharp_tiny_sums_r1 train token")
    for own in (GENERATE, "GRPO_tiny_sums_r1.train"):
        assert command(own)[:3] == [sys.executable, "-Pm", "async_grpo_experiments.runner.stages"]


def test_how_busy_a_stages_gpu_was_is_noted_and_its_peak_packs_the_next_one(
    yard: ExperimentYard, driver: FakeDriver
) -> None:
    assert yard.run(ONE_ROUND, places=TWO_GPUS[:1]) == 0
    assert f"GPU utilization {TRAIN}: 80%\n" in (yard.root / "run.log").read_text()
    ends = r"GPU Memory Summary:\n  GPU 0: \d+\.00 GB taken at most, 80\.00 GB total\n$"
    job = yard.root / "jobs" / "QSharp_tiny_sums_r1"
    assert re.search(ends, (job / "log_generate.txt").read_text())
    assert not (job / "log_train.txt").read_text()  # its process says more of itself
    config = checked(ONE_ROUND)
    needed = MemoryPeaks(yard.root.parent.parent / "memory.json").needed(graph_of(config)[TRAIN], config)
    assert needed is not None and needed > 1.1 * GB


def test_without_a_driver_the_use_is_unknown(yard: ExperimentYard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_usage, "_driver", lambda: None)
    yard.run(ONE_ROUND, places=TWO_GPUS[:1])
    assert f"GPU utilization {TRAIN}: unknown\n" in (yard.root / "run.log").read_text()


@pytest.mark.parametrize("are_measured", [True, False])
def test_stages_of_known_memory_share_a_gpu(
    yard: ExperimentYard, monkeypatch: pytest.MonkeyPatch, are_measured: bool
) -> None:
    """Two stages at a time in one place: a reference and a generation, each of 30 of 80 GB."""
    config = checked(ONE_ROUND)
    peaks = MemoryPeaks(yard.root.parent.parent / "memory.json")
    yard.root.parent.parent.mkdir(parents=True)
    stages = graph_of(config).values()
    answer = StageForecast(memory=[BatchMemory(8, 30 * GB)], disk=0)
    answers = {kind_of(stage, config): answer for stage in stages}
    for stage in stages if are_measured else ():
        assert peaks.peak_of(stage, yard.folder, config, 30 * GB) == 30 * GB
        answers = {}  # nobody asks
    monkeypatch.setattr(experiment, "ask_forecast", lambda config: answers)
    places = [Place(name="gpu0", gpus=("0",), bytes=70 * GB)]
    yard.fail(GENERATE, "hang")  # until the reference is done
    look = experiment.ExperimentRun._look

    def look_and_release(self: Any) -> None:
        look(self)
        hangs = yard.folder / f"{GENERATE}.hangs"
        if hangs.exists() and hangs.read_text() and "reference_tiny_sums.evaluate" in yard.finished:
            os.kill(int(hangs.read_text()), signal.SIGTERM)
            hangs.unlink()

    monkeypatch.setattr(experiment.ExperimentRun, "_look", look_and_release)
    assert yard.run(ONE_ROUND, places=places) == 1  # the generation was ended
    assert yard.finished == ["reference_tiny_sums.evaluate"]


def test_the_peak_of_a_stage_that_shares_its_gpu_is_not_known(driver: FakeDriver) -> None:
    use = peaks.GpuUse(TWO_GPUS, now=iter(range(0, 90, 3)).__next__)
    for running in ({"a": "gpu0"}, {"a": "gpu0", "b": "gpu0", "c": "gpu1"}, {"a": "gpu0", "c": "gpu1"}):
        use.look(running)
    assert (use.take("a").peak_bytes, use.take("b").peak_bytes) == (0, 0)
    assert use.take("c").peak_bytes > 0
    assert use.summary().startswith("GPU 0 80%, ")


def test_a_gpu_is_shared_up_to_what_others_leave(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "visible_gpus", lambda: 2)
    places = experiment._places(checked(tree()))
    assert [place.bytes for place in places] == [int(0.85 * 80 * GB) - 11 * GB, int(0.85 * 80 * GB) - 12 * GB]


def test_out_of_memory_alone_fails_with_what_would_help(yard: ExperimentYard, driver: FakeDriver) -> None:
    keys = {**ONE_ROUND, "training": {"datasets": ["sums"], "gradient_checkpointing": False}}
    yard.fail(TRAIN, f"code {OUT_OF_MEMORY}")
    assert yard.run(keys, places=TWO_GPUS[:1]) == 1
    record = read(yard.root / LEDGER)[TRAIN]
    assert (record.state, record.why) == (
        FAILED,
        "out of memory alone on GPU 0 (80 GB): set algos.QSharp.batch_size=12, training.micro_batch_size=2 or "
        "training.gradient_checkpointing=true",
    )
    graph = graph_of(checked(keys))
    assert way_out(graph[GENERATE], checked(keys), TWO_GPUS[1]) == "GPU 1 (80 GB): set generation.batch_size=4"


@pytest.mark.usefixtures("driver")
def test_a_line_a_minute_has_all_gpus(yard: ExperimentYard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreground, "LINE_EVERY_S", 0.0)
    assert yard.run(ONE_ROUND, places=TWO_GPUS) == 0
    gpus = r"GPU 0 80%, \d+\.0 GB of 80\.0 GB \| GPU 1 81%, \d+\.0 GB of 80\.0 GB"
    assert re.search(rf" 1 MODEL_TRAINED \| .*: evaluate on gpu\d \| {gpus}\n", (yard.root / "run.log").read_text())


@pytest.mark.parametrize(("needed", "is_refused"), [(75 * GB, False), (90 * GB, True)])
def test_a_stage_that_no_place_has_room_for_runs_alone_and_is_refused_where_no_gpu_is_large_enough(
    yard: ExperimentYard, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, needed: int, is_refused: bool
) -> None:
    """The driver says 80 GB, of which others have 10."""
    config = checked(ONE_ROUND)
    answer = StageForecast(memory=[BatchMemory(8, needed)], disk=0)
    answers = {kind_of(stage, config): answer for stage in graph_of(config).values()}
    monkeypatch.setattr(experiment, "ask_forecast", lambda config: answers)
    places = [Place(name="gpu0", gpus=("0",), bytes=70 * GB)]
    if is_refused:
        with pytest.raises(UsageError, match=r"needs about 90\.0 GB, and the largest GPU has 80\.0 GB"):
            yard.run(ONE_ROUND, places=places)
        assert not yard.finished
        return
    assert yard.run(ONE_ROUND, places=places) == 0
    said = f"{TRAIN} needs about 82.5 GB, and the largest place has 70.0 GB: stages like it run alone."
    assert said in (yard.root / "run.log").read_text()
