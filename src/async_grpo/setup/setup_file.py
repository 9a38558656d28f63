"""Load the user's trainer file and call its `get_trainer()`. Needs no torch until that call."""

from __future__ import annotations

import ast
import importlib.util
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from async_grpo.errors import AsyncGRPOError, SetupFileError
from async_grpo.log import logger
from async_grpo.setup.generated import GENERATED
from async_grpo.setup.grpo_config.building import check_set, configurations_with
from async_grpo.setup.process import ending_kept
from async_grpo.setup.replaced import note_originals

if TYPE_CHECKING:
    from trl import GRPOTrainer

_OURS = str(Path(__file__).parent)
_CHARACTERS = 300  # of the reason why a model cannot be loaded; the log has all
MODULE_NAME = "async_grpo_setup_file"
_BY_NAME = {
    "self.ref_model": "the reference model of beta > 0. Set beta=0, or save the model with save_pretrained and load it "
    "from that folder, or train an adapter (peft_config), without which it is its own reference.",
    "processing_class": "the tokenizer. Pass it as processing_class.",
    "reward_processing_class": "the tokenizer of a reward model. Pass it in reward_processing_classes.",
}
"""What TRL loads by the name of a model, by the variable that it is for, and how to do without."""


def check_setup_file(path: Path) -> None:
    """Refuse early, without running it, a file that cannot be a setup file.

    Raises:
        SetupFileError: the file is missing, is not valid Python, or defines no `get_trainer` at its top level.
    """
    if not path.is_file():
        file, _, function = str(path).rpartition(":")
        if Path(file).is_file():
            raise SetupFileError(
                f"{path} names a function of a file. Give the file alone, and call its function get_trainer: "
                f"of a setup file get_trainer() is called, not {function}()."
            )
        raise SetupFileError(
            f"Setup file not found: {path}\nGive the path of a Python file with get_trainer(); `async-grpo init` "
            "writes one."
        )
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise SetupFileError(f"{path} is not valid Python: {error}") from error
    if not any(_binds(node, "get_trainer") for node in tree.body):
        raise SetupFileError(
            f"{path} defines no get_trainer(). Add a function of that name, without required arguments, "
            "that returns a trl.GRPOTrainer; src/app/trainer_setup_tiny.py is an example."
        )


def _binds(node: ast.stmt | ast.ExceptHandler, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name == name
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any((alias.asname or alias.name) in (name, "*") for alias in node.names)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    inner = (ast.stmt, ast.ExceptHandler)
    return any(_binds(child, name) for child in ast.iter_child_nodes(node) if isinstance(child, inner))


def load_trainer(
    path: Path,
    *,
    engine_here: bool = True,
    to_describe: bool = False,
    worker_of: int | None = None,
    policy_on_cpu: bool = False,
    alone: AbstractContextManager[None] | None = None,
    steps: int | None = None,
    seed: int | None = None,
    config_values: Mapping[str, str] | None = None,
) -> GRPOTrainer:
    """Run the file and return what its `get_trainer()` returns.

    Args:
        engine_here: let TRL start vLLM where the file says `use_vllm=True`; else only note the wish.
        to_describe: it will not be trained, so it makes neither repositories on the Hub nor folders.
        worker_of: the trainer only samples and scores, for one of that many processes.
        policy_on_cpu: and its model is not to take memory of the GPU yet.
        alone: entered while `get_trainer()` runs.
        steps, seed: override the file's.
        config_values: override fields of the file's `GRPOConfig` (`--set`).

    Raises:
        SetupFileError: the file or `get_trainer()` raises (its traceback is in the text, from the user's file on),
            or the result is not a `trl.GRPOTrainer`.
        UsageError: one of `config_values` is wrong, or would have no effect.
    """
    check_setup_file(path)
    if seed is not None:
        seed_all(seed)
    note_originals()
    with configurations_with(config_values or {}) as made, _called_alone(path), ending_kept():
        trainer = _built(
            path,
            alone or nullcontext(),
            engine_here=engine_here,
            to_describe=to_describe,
            worker_of=worker_of,
            policy_on_cpu=policy_on_cpu,
        )

    from trl import GRPOTrainer

    from async_grpo.setup.image_files import bound_downloads
    from async_grpo.setup.trl_compat import repair_trl
    from async_grpo.setup.worker_build import KEPT

    if not isinstance(trainer, GRPOTrainer):
        raise SetupFileError(
            f"get_trainer() in {path} must return a trl.GRPOTrainer, but returned {_described(trainer)}."
        )
    changed_by_us = KEPT if worker_of is not None else set()
    check_set(trainer, {name: text for name, text in (config_values or {}).items() if name not in changed_by_us}, made)
    repair_trl()
    bound_downloads()
    if steps is not None:
        trainer.args.max_steps = steps
    if seed is not None:
        from transformers import set_seed

        trainer.args.seed = seed
        set_seed(seed)
    return trainer


@contextmanager
def _called_alone(path: Path) -> Iterator[None]:
    """The command line is that of `python FILE`, for a file that parses it: `TrlParser`, `argparse`."""
    ours, sys.argv = sys.argv, [str(path)]
    try:
        yield
    finally:
        sys.argv = ours


def _built(
    path: Path,
    alone: AbstractContextManager[None],
    *,
    engine_here: bool,
    to_describe: bool,
    worker_of: int | None,
    policy_on_cpu: bool,
) -> Any:
    """What `get_trainer()` returns."""
    began = time.monotonic()
    logger.info("importing {}, and with it torch, transformers and TRL", path.name)
    get_trainer = getattr(_run_file(path), "get_trainer", None)
    if not callable(get_trainer):
        raise SetupFileError(f"get_trainer in {path} is not a function but {type(get_trainer).__name__}.")
    from async_grpo.setup.generator_choice import engines_left_to_workers
    from async_grpo.setup.worker_build import built_for_a_worker, built_to_describe

    try:
        with ExitStack() as changed:
            changed.enter_context(alone)
            if not engine_here:
                changed.enter_context(engines_left_to_workers())
            if worker_of is not None:
                changed.enter_context(built_for_a_worker(worker_of, policy_on_cpu=policy_on_cpu))
            elif to_describe:
                changed.enter_context(built_to_describe())
            logger.info(
                "{} is imported ({:.0f} s); get_trainer() loads model and data", path.name, time.monotonic() - began
            )
            trainer = get_trainer()
            logger.info("get_trainer() has built the trainer ({:.0f} s)", time.monotonic() - began)
            return trainer
    except AsyncGRPOError:  # it says what is wrong
        raise
    except Exception as error:  # anything the user's code raises is the user's to read
        raise SetupFileError(_failed(f"get_trainer() in {path} failed", error, path)) from error


def seed_all(seed: int) -> None:
    """For what the file itself draws, such as a model's first weights: python, numpy, torch and CUDA.

    transformers' `set_seed` would do the same, but Unsloth wants to be imported before it.
    """
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of all devices


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module
    if not path.read_bytes().startswith(GENERATED.encode()):
        sys.path.insert(0, str(path.parent))  # so that the file can import its neighbours, as `python FILE` would
    try:
        spec.loader.exec_module(module)
    except AsyncGRPOError:  # it says what is wrong
        raise
    except Exception as error:  # anything the user's code raises is the user's to read
        raise SetupFileError(_failed(f"{path} could not be loaded", error, path)) from error
    return module


def _described(value: object) -> str:
    return "None (is a `return` missing?)" if value is None else f"a {type(value).__module__}.{type(value).__name__}"


def _failed(what: str, error: Exception, path: Path) -> str:
    """One message: the frames from the user's file on, then the error; Async-GRPO's own frames would not help.

    Of a model that cannot be loaded only a sentence.
    """
    if isinstance(error, OSError) and (name := _not_loaded(error)) is not None:
        return _cannot_be_loaded(name, error, path)
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if frame.filename == str(path)), 0)
    shown = [frame for frame in frames[first:] if not frame.filename.startswith(_OURS)]
    lines = traceback.format_list(shown) + traceback.format_exception_only(error)
    return f"{what}:\n{''.join(lines).rstrip()}"


def _cannot_be_loaded(name: str, error: OSError, path: Path) -> str:
    """The sentence about a model or tokenizer, in place of twenty frames of transformers, which go to stderr."""
    traceback.print_exception(error, file=sys.stderr)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f"line {lines[-1]} of {path}" if lines else str(path)
    wanted = [_BY_NAME[it] for frame in frames if (it := (frame.line or "").partition(" = ")[0]) in _BY_NAME]
    if not name and wanted:
        return f"A model that was made in code has no name ({where}), and TRL loads by it {wanted[0]}"
    return (
        f"{name or repr(name)} cannot be loaded ({where}): {' '.join(str(error).split())[:_CHARACTERS]}\n"
        "Give the name of a model of the hub, or a folder with its config.json. Without a network it must have been "
        "downloaded before; a private or gated one needs HF_TOKEN. The traceback is in the log."
    )


def _not_loaded(error: OSError) -> str | None:
    """The name that a `from_pretrained` on the way to the error was to load; None where none was."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        wanted = frame.f_locals.get("pretrained_model_name_or_path")
        if frame.f_code.co_name == "from_pretrained" and isinstance(wanted, (str, os.PathLike)):
            return str(wanted)
    return None
