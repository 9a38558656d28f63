"""What the keys come to: a setup file, the options of `train`, and a few lines that say what will happen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from datasets import Dataset

from async_grpo.errors import UsageError
from async_grpo.formatting import counted
from async_grpo.rundir.folders import check_own, make_folder
from async_grpo.tasks import load
from async_grpo.tasks.files import cut, files_by_task
from async_grpo.verl_keys.devices import Devices
from async_grpo.verl_keys.keys import ACTOR, MODEL, ROLLOUT, Keys
from async_grpo.verl_keys.setup_text import RUN, SetupText, is_ppo
from async_grpo.verl_keys.steps import Steps, total_steps

SETUP = "setup"  # folder of the setup file alone: what is beside a setup file is taken for a part of it


@dataclass(frozen=True, slots=True)
class VerlRun:
    """A run that has not begun.

    Args:
        folder: of checkpoints; the run directory, and a folder for the setup file, are in it.
        setup: the text of the setup file.
        accelerate: that of a configuration of accelerate; None: the trainer is one process.
        flags: options of `train`, but for the setup file and the run directory.
        lines: what is printed before it begins.
        patience, threshold: of early stopping; a patience of 0: none.
        resumes: whether an unfinished run in the folder is continued.
    """

    folder: Path
    setup: str
    accelerate: str | None
    flags: Sequence[str]
    lines: Sequence[str]
    patience: int
    threshold: float
    resumes: bool

    @property
    def run_dir(self) -> Path:
        return self.folder / RUN

    @property
    def setup_file(self) -> Path:
        """Named after its text: a later run with other keys leaves this one's file as it is."""
        return self.folder / SETUP / f"main_ppo_{hashlib.sha256(self.setup.encode()).hexdigest()[:8]}.py"

    @property
    def accelerate_file(self) -> Path:
        return accelerate_file(self.folder)

    def write(self) -> None:
        """Write the files. `RunDirError`: the folder is another user's, who could change what the run imports."""
        check_own(self.folder.resolve())
        make_folder(self.setup_file.parent)
        self.setup_file.write_text(self.setup)
        if self.accelerate is not None:
            self.accelerate_file.write_text(self.accelerate)


def accelerate_file(folder: Path) -> Path:
    return folder / SETUP / "accelerate.yaml"


def planned(keys: Keys, visible_gpus: Callable[[], int]) -> VerlRun:
    """What a run with these keys is.

    Raises:
        UsageError: a value cannot be used, or two do not go together; a file of rows cannot be read.
    """
    training = _files(keys["data.train_files"])
    if training is None or keys[f"{MODEL}.path"] is None:
        missing = f"{MODEL}.path" if training is not None else "data.train_files"
        raise UsageError(f"{missing} is needed: verl's default is a folder of its authors.")
    held_out = _files(keys["data.val_files"])
    _refuse_contradictions(keys, held_out is not None)
    devices = Devices.of(keys, visible_gpus)
    steps = Steps.of(keys, devices.ranks)
    rows = load(training)
    total, whence = total_steps(keys, len(rows))
    folder = _folder(keys)
    setup = SetupText(
        keys=keys,
        steps=steps,
        devices=devices,
        total=total,
        folder=folder,
        training=training,
        held_out=held_out,
        has_tasks=is_multi_task(keys, len(training)),
    )
    lines = [
        *keys.without_effect,
        *(f"{name} has no effect here: {why}" for name, why in _idle(keys, devices, has_tasks=setup.has_tasks)),
        f"devices: {devices.sentence}",
        *_other_nodes(keys),
        f"batch: {steps.prompts:,} prompts × {counted(steps.completions, 'completion')}, "
        f"{counted(steps.updates, 'optimizer step')} for each step of verl",
        f"training: {steps.both(total)} ({whence})",
        *_frequencies(keys, steps, evaluates=held_out is not None),
    ]
    if held_out is not None:
        lines += _seen_in_training(rows, load(held_out, separate=True))
    return VerlRun(
        folder=folder,
        setup=setup.text(),
        accelerate=devices.accelerate(),
        flags=_flags(keys, steps, devices, total, folder, evaluates=held_out is not None),
        lines=lines,
        patience=max(0, keys["trainer.early_stopping_patience"]),
        threshold=keys["trainer.early_stopping_threshold"],
        resumes=keys["trainer.resume_mode"] == "auto",
    )


def _idle(keys: Keys, devices: Devices, *, has_tasks: bool) -> Iterator[tuple[str, str]]:
    """Keys that were given and change nothing beside the others, and why."""
    never = keys["data.val_files"] is None or keys["trainer.test_freq"] <= 0
    in_reward, is_fixed = keys["algorithm.use_kl_in_reward"], keys["algorithm.kl_ctrl.type"] == "fixed"
    both_sides = all(keys[f"{ACTOR}.clip_ratio_{side}"] is not None for side in ("low", "high"))
    of_evaluations = f"{ROLLOUT}.val_kwargs.* trainer.val_before_train data.val_max_samples"
    for is_idle, patterns, why in (
        (not is_ppo(keys), "critic.* algorithm.gamma algorithm.lam", "algorithm.adv_estimator=grpo has no critic"),
        (is_ppo(keys), "algorithm.norm_adv*", "it is of algorithm.adv_estimator=grpo"),
        (not in_reward, "algorithm.kl_*", "algorithm.use_kl_in_reward is false"),
        (in_reward and is_fixed, "algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", "kl_ctrl.type is fixed"),
        (not keys[f"{ACTOR}.use_kl_loss"], f"{ACTOR}.kl_loss_coef", "use_kl_loss is false"),
        (both_sides, f"{ACTOR}.clip_ratio", "clip_ratio_low and clip_ratio_high are given"),
        (not has_tasks, "mtl.method mtl.num_* mtl.ensure_*", "mtl.enabled is false, or there is one task"),
        (never, of_evaluations, "nothing is evaluated"),
        (
            not never and not keys[f"{ROLLOUT}.val_kwargs.do_sample"],
            f"{ROLLOUT}.val_kwargs.temperature {ROLLOUT}.val_kwargs.top_*",
            "val_kwargs.do_sample is false, so evaluations are greedy",
        ),
        (keys["trainer.early_stopping_patience"] <= 0, "trainer.early_stopping_threshold", "there is no patience"),
        (keys["trainer.save_freq"] <= 0, "trainer.max_actor_ckpt_to_keep", "trainer.save_freq saves nothing"),
        (
            keys[f"{ROLLOUT}.name"] == "hf" or not devices.trainers,
            f"{ROLLOUT}.gpu_memory_utilization",
            "it is of vLLM on a GPU",
        ),
        (
            not devices.trainers,
            f"trainer.n_gpus_per_node async.* {ROLLOUT}.tensor_model_parallel_size",
            "all is on the CPU",
        ),
    ):
        if is_idle:
            yield from ((name, why) for name in keys.given if any(fnmatchcase(name, it) for it in patterns.split()))


def _other_nodes(keys: Keys) -> list[str]:
    others = keys["trainer.nnodes"] - 1
    return [f"nodes: {counted(others, 'other machine')} on Ray, which only generate"] if others else []


def is_multi_task(keys: Keys, tasks: int) -> bool:
    """Whether batches are made of tasks: mtl.enabled decides, else whether there are several."""
    asked = keys["mtl.enabled"]
    return tasks > 1 if asked is None else bool(asked)


def _seen_in_training(training: Dataset, held_out: Mapping[str, Dataset]) -> Iterator[str]:
    known = {*map(_text, training["prompt"][:])}
    prompts = [_text(prompt) for rows in held_out.values() for prompt in rows["prompt"][:]]
    if again := [text for text in prompts if text in known]:
        yield (
            f"warning: {len(again):,} of the {len(prompts):,} rows of data.val_files have a prompt of "
            f"data.train_files (the first: {cut(repr(again[0]))}): their figures say nothing of new problems"
        )


def _text(prompt: str | list[dict[str, str]]) -> str:
    """As text: messages with one turn of the user are the text of that turn."""
    if isinstance(prompt, str):
        return prompt
    return prompt[0]["content"] if len(prompt) == 1 else json.dumps(prompt)


def _files(text: str | None) -> dict[str, list[str]] | None:
    """The files of each task, absolute: a resume may be started in another folder."""
    if text is None:
        return None
    return {task: [str(path.absolute()) for path in paths] for task, paths in files_by_task(text).items()}


def _folder(keys: Keys) -> Path:
    default = Path("checkpoints") / keys["trainer.project_name"] / keys["trainer.experiment_name"]
    return Path(keys["trainer.default_local_dir"] or default).expanduser().absolute()


def _refuse_contradictions(keys: Keys, evaluates: bool) -> None:
    served = keys[f"{ROLLOUT}.tensor_model_parallel_size"]
    patience = keys["trainer.early_stopping_patience"]
    for is_wrong, why in (
        (
            keys["algorithm.use_kl_in_reward"] and keys[f"{ACTOR}.use_kl_loss"],
            f"algorithm.use_kl_in_reward and {ACTOR}.use_kl_loss: there is one coefficient. Leave one of them out.",
        ),
        (
            keys["algorithm.use_kl_in_reward"] and not is_ppo(keys),
            f"algorithm.use_kl_in_reward needs algorithm.adv_estimator=gae. With grpo take {ACTOR}.use_kl_loss=true.",
        ),
        (
            not is_ppo(keys) and keys[f"{ROLLOUT}.n"] == 1,
            f"algorithm.adv_estimator=grpo compares completions of a prompt: give {ROLLOUT}.n at least 2.",
        ),
        (
            served > 1 and keys[f"{ROLLOUT}.name"] == "hf",
            f"{ROLLOUT}.tensor_model_parallel_size={served} needs {ROLLOUT}.name=vllm: it is of a vLLM server.",
        ),
        (
            patience > 0 and not (evaluates and keys["trainer.test_freq"] > 0),
            f"trainer.early_stopping_patience={patience} counts evaluations: give data.val_files and trainer.test_freq",
        ),
    ):
        if is_wrong:
            raise UsageError(why)


def _frequencies(keys: Keys, steps: Steps, *, evaluates: bool) -> Iterator[str]:
    """How often a run evaluates and saves, in both counts of steps; -1 and 0 are never."""
    test, save, patience = (keys[f"trainer.{name}"] for name in ("test_freq", "save_freq", "early_stopping_patience"))
    match evaluates, test > 0:
        case True, True:
            yield f"evaluation: every {steps.both(test)}"
        case False, True:
            yield f"evaluation: never, as there are no data.val_files (trainer.test_freq={test})"
        case True, False:
            yield f"evaluation: never (trainer.test_freq={test}): data.val_files have no effect"
        case _:
            yield "evaluation: never"
    if save > 0:
        yield f"checkpoints: every {steps.both(save)}"
    else:
        yield f"checkpoints: none, also not at the end (trainer.save_freq={save})"
    if patience > 0:
        yield f"early stopping: after {patience} evaluations, {steps.both(patience * test)}, without improvement"


def _flags(keys: Keys, steps: Steps, devices: Devices, total: int, folder: Path, *, evaluates: bool) -> list[str]:
    flags = ["--steps", str(total * steps.updates), *devices.flags(str(accelerate_file(folder)))]
    flags += devices.of_other_nodes(keys["trainer.nnodes"])
    if keys[f"{ROLLOUT}.name"] is not None or devices.of_a_server > 1:
        flags += ["--generator", "vllm-server" if devices.of_a_server > 1 else keys[f"{ROLLOUT}.name"]]
    test = keys["trainer.test_freq"]
    if not evaluates or test <= 0:
        return [*flags, "--eval-every", "0"]
    asked = {name: keys[f"{ROLLOUT}.val_kwargs.{name}"] for name in ("n", "do_sample", "temperature", "top_p", "top_k")}
    flags += ["--eval-every", str(test * steps.updates), "--eval-replicates", str(asked["n"])]
    flags += ["--eval-temperature", f"{asked['temperature'] if asked['do_sample'] else 0.0:g}"]
    flags += ["--eval-top-p", f"{asked['top_p']:g}", "--eval-top-k", str(max(0, asked["top_k"]))]
    return flags if keys["trainer.val_before_train"] else [*flags, "--no-eval-first"]
