"""The GPUs of a trainer of several processes: accelerate counts physical ones, we count what is visible already."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.cli import main as cli_main
from async_grpo.cli.compute import train
from async_grpo.errors import UsageError
from async_grpo.launch import accelerate_entry
from async_grpo.settings import LaunchSettings
from async_grpo.setup.accelerate_config import DEEPSPEED, AccelerateConfig

EXAMPLE = Path(__file__).parents[3] / "examples" / "accelerate" / "ddp.yaml"


def launched_with(config: Path, options: list[str]) -> str | None:
    """What accelerate itself would set CUDA_VISIBLE_DEVICES to."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = ["--config_file", str(config), "--main_process_port", "0", *options, "script.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    return prepare_multi_gpu_env(args).get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("given", "ranks"), [("4,5,6,7", "4,5"), ("7, 6", "7,6"), ("GPU-aa,GPU-bb", "GPU-aa,GPU-bb"), (None, "0,1")]
)
def test_ranks_get_gpus_of_those_that_are_visible(
    given: str | None, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    launch = LaunchSettings(accelerate_config=EXAMPLE)
    assert launched_with(EXAMPLE, accelerate_entry._gpu_options(launch, env)) == ranks


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu_ids: '2, 3'\n", ["2", "3"]),
        ('{\n  "gpu_ids": "1",\n "x": 1}', ["1"]),
        ("gpu_ids: all", []),
        ("gpu_ids: 0", ["0"]),
        ("x: |\n  gpu_ids: 1,2", []),
        ("num_processes: 2", []),
    ],
)
def test_gpus_that_a_configuration_names(text: str, gpus: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert AccelerateConfig.read(tmp_path / "a.yaml").gpus == tuple(gpus)


def test_more_gpus_than_are_visible_are_refused() -> None:
    with pytest.raises(UsageError, match=r"GPU 1 was asked for, but CUDA_VISIBLE_DEVICES=4 leaves 1"):
        accelerate_entry._gpu_options(LaunchSettings(accelerate_config=EXAMPLE), {"CUDA_VISIBLE_DEVICES": "4"})
    on_ray = LaunchSettings(accelerate_config=EXAMPLE, trainer_nodes=2, machine_rank=1)  # which gives the GPUs
    assert accelerate_entry._gpu_options(on_ray, {"CUDA_VISIBLE_DEVICES": "4"}) == ["--gpu_ids", "4"]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n", True),
        ('{"distributed_type": "DEEPSPEED"}', True),
        ("distributed_type: FSDP\n# not DEEPSPEED\n", False),
    ],
)
def test_a_configuration_of_deepspeed_is_refused_where_deepspeed_is_not_installed(
    text: str, asked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "find_spec", lambda name: None)
    config, setup = tmp_path / "zero3.yaml", tmp_path / "setup.py"
    config.write_text(text)
    setup.write_text("get_trainer = None\n")
    assert (AccelerateConfig.read(config).kind == DEEPSPEED) is asked
    if asked:
        given = ["train", str(setup), "--master-device-id", "cpu", "--accelerate-config", str(config), "--dry-run"]
        assert cli_main(given) == 2
        assert "asks for DeepSpeed, which is not installed here" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a: [", "- gpu_ids", "num_processes: many", "", "fsdp_config: 3"])
def test_what_is_no_configuration_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"a.yaml is no configuration of accelerate: \S.*`accelerate config` writes"):
        AccelerateConfig.read(tmp_path / "a.yaml")
    with pytest.raises(UsageError, match=r"There is no accelerate configuration .*nowhere.yaml"):
        AccelerateConfig.read(tmp_path / "nowhere.yaml")
