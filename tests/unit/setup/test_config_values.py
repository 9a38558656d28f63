"""`--set NAME=VALUE`: what becomes of the text, what is refused, and that nothing is silently without effect."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from async_grpo.cli import main
from async_grpo.errors import UsageError
from async_grpo.setup import trl_compat
from async_grpo.setup.devices import hold_to_device
from async_grpo.setup.grpo_config.batch import BatchError
from async_grpo.setup.grpo_config.values import field_types, parsed
from async_grpo.setup.setup_file import MODULE_NAME, load_trainer

field_types()  # reads the sources of the real TRL, and remembers what they say


@dataclass
class FakeConfig:
    """In place of `trl.GRPOConfig`: checks itself, and derives one field from others, as that does."""

    learning_rate: float = 1e-6
    num_generations: int = 8
    generation_batch_size: int | None = None
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    steps_per_generation: int = 1
    num_iterations: int = 1
    world_size: int = 1
    use_cpu: bool = False

    def __post_init__(self) -> None:
        self.generation_batch_size = self.generation_batch_size or self.num_generations
        if self.generation_batch_size % self.num_generations:
            raise ValueError("generation_batch_size must be divisible by num_generations")


class FakeTrainer:
    """In place of `trl.GRPOTrainer`."""

    def __init__(self, args: Any = None) -> None:
        self.args = args or types.SimpleNamespace(learning_rate=1e-6)


@pytest.fixture(autouse=True)
def fake_trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    trl = types.ModuleType("trl")
    trl.GRPOConfig, trl.GRPOTrainer = FakeConfig, FakeTrainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_config", trl)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(trl_compat, "repair_trl", lambda: None)
    yield
    sys.modules.pop(MODULE_NAME, None)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("learning_rate", "1e-5", 1e-5),
        ("num_generations", "4", 4),
        ("num_generations", "none", None),
        ("bf16", "true", True),
        ("bf16", "False", False),
        ("loss_type", "cispo", "cispo"),
        ("optim", "adamw_torch", "adamw_torch"),
        ("scale_rewards", "none", "none"),
        ("report_to", "none", "none"),
        ("report_to", '["wandb"]', ["wandb"]),
        ("reward_weights", "[1, 0.5]", [1, 0.5]),
        ("generation_kwargs", '{"min_p": 0.1}', {"min_p": 0.1}),
        ("generation_kwargs", "none", None),
        ("deepspeed", "zero2.json", "zero2.json"),
        ("max_grad_norm", "inf", float("inf")),
        ("output_dir", "a folder=1", "a folder=1"),
        ("model_init_kwargs", f'{{"revision": "{"0a" * 20}"}}', {"revision": "0a" * 20}),
        ("generation_kwargs", '{"eos_token_id": 151643}', {"eos_token_id": 151643}),
    ],
)
def test_a_text_becomes_a_value_of_the_type_of_the_field(name: str, text: str, value: object) -> None:
    found = parsed({name: text})[name]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("learning_rte", "1", "GRPOConfig has no field of this name. Did you mean learning_rate?"),
        ("zzz", "1", "GRPOConfig has no field of this name. TRL's documentation"),
        ("learning_rate", "fast", "learning_rate must be a number, got 'fast'"),
        ("learning_rate", "nan", "learning_rate must be a number"),
        ("num_generations", "2.5", "num_generations must be a whole number, or none, got '2.5'"),
        ("bf16", "yes", "bf16 must be true or false, or none"),
        ("reward_weights", "1,2", "reward_weights must be a list in JSON, or none"),
        ("generation_kwargs", "min_p", "generation_kwargs must be an object in JSON, or none"),
        ("max_steps", "5", "it is --steps"),
        ("seed", "5", "it is --seed"),
        ("max_prompt_length", "512", "TRL no longer cuts prompts"),
        ("hub_token", "x", "a token is a secret"),
        ("model_init_kwargs", '{"token": "hf_abcdefghijklmnopqrstuv"}', "this one looks like a secret"),
        ("model_init_kwargs", '{"password": "correct horse"}', "this one looks like a secret"),
        ("vllm_server_base_url", "http://me:pass@machine:8000", "this one looks like a secret"),
    ],
)
def test_what_is_refused_and_how(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parsed({name: text})
    assert message in str(refusal.value)


@pytest.mark.parametrize("command", ["train", "server", "evaluate", "doctor"])
def test_every_command_refuses_it_before_it_does_anything(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["model"] if command == "evaluate" else []
    assert main([command, *model, "--set", "learning_rte=1"]) == 2
    assert "Did you mean learning_rate?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def load(folder: Path, text: str, **values: str) -> Any:
    (folder / "my_trainer.py").write_text(text)
    return load_trainer(folder / "my_trainer.py", config_values=values)


IN_GET_TRAINER = """
from trl import GRPOConfig, GRPOTrainer

def get_trainer():
    return GRPOTrainer(args=GRPOConfig(learning_rate=3e-6))
"""
AT_THE_TOP = """
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(learning_rate=3e-6)

def get_trainer():
    return GRPOTrainer(args=args)
"""
A_SUBCLASS = """
from dataclasses import dataclass
from trl import GRPOConfig, GRPOTrainer

@dataclass
class Config(GRPOConfig):
    learning_rate: float = 3e-6

def get_trainer():
    return GRPOTrainer(args=Config(3e-6))
"""


@pytest.mark.parametrize("text", [IN_GET_TRAINER, AT_THE_TOP, A_SUBCLASS])
def test_it_reaches_the_configuration_before_it_checks_itself(text: str, tmp_path: Path) -> None:
    trainer = load(tmp_path, text, learning_rate="1e-5", num_generations="4")
    assert (trainer.args.learning_rate, trainer.args.generation_batch_size) == (1e-5, 4)
    assert load(tmp_path, text).args.learning_rate == 3e-6, "another trainer is as its file says"


NO_CONFIGURATION = """
from trl import GRPOTrainer

def get_trainer():
    return GRPOTrainer()
"""
CHANGED_AFTERWARDS = """
from trl import GRPOConfig, GRPOTrainer

def get_trainer():
    args = GRPOConfig()
    args.learning_rate = 3e-6
    return GRPOTrainer(args=args)
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NO_CONFIGURATION, "learning_rate has no effect: the setup file makes no GRPOConfig"),
        (CHANGED_AFTERWARDS, "learning_rate=.5 has no effect: the trainer has 3e-06"),
        (IN_GET_TRAINER, "lam=.5 has no effect: it is a field of PPOConfig, .* a FakeConfig"),
    ],
)
def test_what_would_have_no_effect_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--set {said}"):
        load(tmp_path, text, **{said.partition("=")[0].partition(" ")[0]: ".5"})


def test_the_file_decides_when_trl_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may set variables of the environment first, or import Unsloth."""
    package = tmp_path / "packages" / "trl"
    (package / "trainer").mkdir(parents=True)
    (package / "trainer" / "__init__.py").touch()
    config = "class GRPOConfig:\n    learning_rate = 0.1\n    def __post_init__(self): ...\n"
    (package / "trainer" / "grpo_config.py").write_text(config)
    trainer = "class GRPOTrainer:\n    def __init__(self, args): self.args = args\n"
    (package / "__init__.py").write_text("from trl.trainer.grpo_config import GRPOConfig\n" + trainer)
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(package.parent))
    made = "args = GRPOConfig()\nargs.__post_init__()\n"
    first = "import sys\nassert 'trl' not in sys.modules\nfrom trl import GRPOConfig, GRPOTrainer\n"
    text = first + made + "def get_trainer():\n    return GRPOTrainer(args=args)\n"
    before = list(sys.meta_path)
    try:
        assert load(tmp_path, text, learning_rate="1e-5").args.learning_rate == 1e-5
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
            del sys.modules[name]
    assert sys.meta_path == before


A_MISFIT = """
from trl import GRPOConfig, GRPOTrainer

def get_trainer():
    return GRPOTrainer(args=GRPOConfig(num_generations=3, generation_batch_size=8))
"""


def test_a_batch_that_does_not_divide_gets_the_numbers_that_fit(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"batch of 8 .* not divisible by num_generations=3.*Set one of: "):
        load(tmp_path, A_MISFIT)
    assert load(tmp_path, A_MISFIT, num_generations="4").args.num_generations == 4


def test_a_process_on_the_cpu_says_so_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert load(tmp_path, IN_GET_TRAINER).args.use_cpu is False
    hold_to_device("cpu", os.environ)
    assert load(tmp_path, IN_GET_TRAINER).args.use_cpu is True
