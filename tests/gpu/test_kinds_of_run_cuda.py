"""Each kind of run on one GPU, small: the trainer and two workers that map its weights, in a few steps.

The model is tiny, so these say that a path works on a GPU, not how fast it is. With GPU_TESTS_DEVICE=cpu on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from gpu_runs import DEVICE_ID, DEVICES, ROOT, cli, expect_end, expect_finished, mismatch, said
from on_device import DEVICE, ON_CPU, need_device

RUN_S = 240.0
STEPS = 6
EXAMPLES = ROOT / "examples"
SUMS = str(ROOT / "src" / "app" / "trainer_setup_tiny.py")
SHAPES = str(ROOT / "benchmarks" / "setups" / "qwen3_shape.py")
SHAPE = {"QWEN3_SHAPE": "small", "COMPLETION": "16"} if ON_CPU else {"QWEN3_SHAPE": "0.6B", "COMPLETION": "64"}
ONE_MILLION = str(ROOT / "tests" / "with_vllm" / "setups" / "qwen3_1m.py")
ADAPTER = {"TEST_LORA": "1", "GPU_TESTS_DEVICE": DEVICE}
BY_VLLM = ("--generator", "vllm", "--worker-device-ids", DEVICE_ID)
RECORDED = ("--delta-every", "1")

pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(ON_CPU, reason="needs a GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`needs`: packages without which the test is skipped. `then`: commands that have to succeed after the run."""

    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    then: tuple[tuple[str, ...], ...] = ()


KINDS = {
    "sums": Kind(
        arguments=(SUMS, "--set", f"save_steps={STEPS}", "--set", "output_dir=out"),
        then=(("evaluate", f"out/checkpoint-{STEPS}", "--config", SUMS, "--eval-replicates", "1", *DEVICES),),
    ),
    "weights in host memory": Kind(arguments=(SUMS, "--weights", "host")),
    "every version kept": Kind(
        arguments=(SUMS, *RECORDED), needs=("zstandard", "xxhash"), then=(("delta", "verify", "worker"),)
    ),
    "adapter": Kind(arguments=(str(EXAMPLES / "lora" / "my_trainer.py"),)),
    "adapter, every version kept": Kind(
        arguments=(str(EXAMPLES / "lora" / "my_trainer.py"), *RECORDED),
        needs=("zstandard", "xxhash"),
        then=(("delta", "verify", "worker"),),
    ),
    "images": Kind(arguments=(str(EXAMPLES / "images" / "my_trainer.py"),)),
    "tools, credit for each turn": Kind(
        arguments=(str(EXAMPLES / "triviaqa_search" / "my_trainer.py"),), needs=("bm25s",), env={"MODEL": "tiny"}
    ),
    "two tasks by PPO": Kind(arguments=(str(EXAMPLES / "tasks" / "my_trainer.py"),), needs=("torchjd",)),
    "vLLM": Kind(arguments=(SHAPES, *BY_VLLM), needs=("vllm",), env=SHAPE),
    "vLLM, adapter": Kind(arguments=(ONE_MILLION, *BY_VLLM), needs=("vllm",), env=ADAPTER),
}


@pytest.fixture(autouse=True)
def device() -> None:
    need_device()


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_run(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    for package in kind.needs:
        if find_spec(package) is None:  # imported here, it could take memory of the GPU in this process
            pytest.skip(f"{package} is not installed")
    arguments = (*DEVICES, "--generator", "hf", "--steps", str(STEPS), *kind.arguments)
    expect_end(cli(tmp_path, "train", *arguments, **kind.env), tmp_path, RUN_S)
    expect_finished(tmp_path, STEPS)
    for command in kind.then:
        expect_end(cli(tmp_path, *command), tmp_path, RUN_S)
    differences = mismatch(tmp_path)
    print(f"{name}: mismatch of sampler and trainer, a step: {', '.join(f'{one:.2g}' for one in differences)}")
    assert differences and max(differences) < 0.05, said(tmp_path)


def test_a_sweep_of_two_seeds_in_the_place_that_it_chooses(tmp_path: Path) -> None:
    run = cli(tmp_path, "sweep", SUMS, "--seeds", "1,2", "--steps", str(STEPS), "-n", "1")
    expect_end(run, tmp_path, RUN_S)
    print(said(tmp_path))


@needs_gpu
@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "offloaded"])
def test_a_sharded_trainer_of_one_process(offload: bool, tmp_path: Path) -> None:
    """FSDP2 over NCCL; offloaded: parameters, gradients and the optimizer's state are in host memory."""
    config = yaml.safe_load((EXAMPLES / "accelerate" / "fsdp2.yaml").read_text())
    config |= {"num_processes": 1, "gpu_ids": "0"}
    config["fsdp_config"]["fsdp_offload_params"] = offload
    (tmp_path / "fsdp2.yaml").write_text(yaml.safe_dump(config))
    sharded = ("--accelerate-config", "fsdp2.yaml", "--worker-device-ids", "0,0", "--generator", "hf")
    env = {"QWEN3_SHAPE": "tiny", "COMPLETION": "16", "STEPS": str(STEPS)}
    expect_end(cli(tmp_path, "train", SHAPES, *sharded, **env), tmp_path, RUN_S)
    expect_finished(tmp_path, STEPS)
    assert max(mismatch(tmp_path)) < 0.05  # bf16


def test_an_experiment_shares_a_gpu_by_memory(tmp_path: Path) -> None:
    """Two rounds of Q#: generation with guidance, training of the head, and evaluation."""
    from kit.real_experiment import all_stages_have_finished, qsharp_on_ascents

    system = {"device": "cpu" if ON_CPU else "auto", "max_parallel_jobs": 2, "deterministic": ON_CPU}
    experiment = qsharp_on_ascents(tmp_path, system=system)
    root = experiment.begin()
    assert experiment.run(f"resume_from={root}") == 0, log_of(root)
    all_stages_have_finished(root)
    print(log_of(root))
    logs = "".join(log.read_text() for log in root.glob("jobs/*/log_*.txt"))
    assert ON_CPU or ("GPU Memory Summary:" in logs and "GPU utilization QSharp_tiny_ascents_r2" in log_of(root))


def log_of(root: Path) -> str:
    return (root / "run.log").read_text()
