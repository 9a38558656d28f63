#!/usr/bin/env python3
"""The entry point of a training job of SageMaker, or of any service with the folders of /opt/ml.

    python train.py --model_name Qwen/Qwen2.5-7B-Instruct --num_gpus 8

The trainer has GPUs 0 to n-2, the worker with vLLM the last. A job that is stopped writes a checkpoint, and the next
one with the same checkpoints continues.
"""

import difflib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import hyperparameters
from hyperparameters import Hyperparameters, Refused

from async_grpo.evals import early_stopping

HERE = Path(__file__).resolve().parent
STOP_GRACE_S = 100  # of the 120 that a spot instance has between its SIGTERM and its end
REASON_CHARACTERS = 1024  # of the failure file, as many as the service shows
SHARDED = "pytorch_model_fsdp_0"
CHANNELS = {
    "model": "JOB_MODEL_NAME",
    "index": "JOB_INDEX",
    "training": "JOB_DATA",
    "evaluation": "JOB_EVALUATION",
}


def main(arguments: list[str]) -> int:
    root = Path(os.environ.get("SM_ROOT", "/opt/ml"))
    try:
        values = hyperparameters.read(arguments, os.environ, root)
        print(f"trainer={values.trainer}: credit {values.credit!r} of TurnGRPOTrainer", flush=True)
        checkpoints = _checkpoints(root)
        env = _environment(values, root, checkpoints)
        hyperparameters.check_same_job(values, checkpoints / "job.json", begun=_has_begun(checkpoints))
        watch = early_stopping.ImprovementWatch(
            checkpoints / "run" / "evaluations.jsonl", values.early_stopping_patience, values.early_stopping_threshold
        )
        code = 0 if _may_stop(watch) else _train(command(values, checkpoints), env, watch)
        if code == 0 and not _stopped:
            _export(checkpoints / "trainer", root / "model", env, best=watch.look())
    except Refused as refusal:
        return _failed(root, str(refusal))
    except (OSError, subprocess.CalledProcessError) as error:
        return _failed(root, f"{type(error).__name__}: {error}", code=1)
    return code if code == 0 else _failed(root, ended_with(code, _lines), code)


def _checkpoints(root: Path) -> Path:
    """The folder that the service copies to S3 and back."""
    folder = root / "checkpoints"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        raise Refused(
            f"Checkpoints cannot be written to {folder} ({error.strerror}). Give the job a CheckpointConfig with "
            f"LocalPath {folder}, and a user that may write there."
        ) from None
    return folder


def _environment(values: Hyperparameters, root: Path, checkpoints: Path) -> dict[str, str]:
    env = hyperparameters.environment(values)
    hyperparameters.check_tracker(values, env)
    env["JOB_CHECKPOINTS"] = str(checkpoints / "trainer")
    env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    given = given_channels(env)
    for channel, name in CHANNELS.items():
        folder = Path(env.get(f"SM_CHANNEL_{channel.upper()}", root / "input" / "data" / channel))
        if folder.is_dir():
            env[name] = str(folder)
        elif channel in given or f"SM_CHANNEL_{channel.upper()}" in env:
            raise Refused(f"The channel {channel} was given to the job, and there is no folder {folder}.")
    _check_files(env)
    check_questions(values, env)
    return env


def given_channels(env: Mapping[str, str]) -> list[str]:
    """The channels of the job, by the service's `SM_CHANNELS`, a JSON list."""
    text = env.get("SM_CHANNELS") or "[]"
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise Refused(f"SM_CHANNELS must be a JSON list of names, got {text[:100]!r}.")
    check_channels(found)
    return found


def check_channels(names: Iterable[str]) -> None:
    """Refuse a channel that the job would not read."""
    for name in names:
        if name not in CHANNELS:
            near = difflib.get_close_matches(name, CHANNELS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise Refused(f"There is no channel {name!r}: the job reads {', '.join(CHANNELS)}.{hint}")


def check_questions(values: Hyperparameters, given: Mapping[str, str]) -> None:
    """Refuse channels that do not go together. `given`: what the setup file reads."""
    if "JOB_EVALUATION" in given and "JOB_DATA" not in given:
        raise Refused("The channel evaluation needs the channel training: they are searched in one index.")
    if "JOB_DATA" in given and "JOB_INDEX" not in given:
        raise Refused("Questions of the channel training need the channel index: a folder with an index of bm25s.")
    if values.early_stopping_patience and "JOB_DATA" in given and "JOB_EVALUATION" not in given:
        raise Refused("early_stopping_patience needs the channel evaluation: questions that are not trained on.")


def _check_files(env: Mapping[str, str]) -> None:
    for channel in ("training", "evaluation"):
        if (data := env.get(CHANNELS[channel])) and not list(Path(data).rglob("*.jsonl")):
            raise Refused(f"The channel {channel} has no .jsonl file in {data}: one row a line, question and aliases.")


_stopped: list[int] = []
_lines: list[str] = []


def _train(command_line: list[str], env: dict[str, str], watch: early_stopping.ImprovementWatch) -> int:
    """Run `async-grpo train`, or continue it, and pass the service's SIGTERM on; send one where it may stop early."""
    started: list[subprocess.Popen[str]] = []

    def stop(number: int, _frame: object) -> None:
        _stopped.append(number)
        for process in started:
            process.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    process = subprocess.Popen(command_line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started.append(process)
    if _stopped:  # while it was started
        process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    asked = False
    for line in process.stdout:
        print(line, end="", flush=True)
        _lines[:] = [*_lines[-20:], line.rstrip()]
        if not asked and _may_stop(watch):
            asked = True
            process.send_signal(signal.SIGTERM)
    return process.wait()


def _may_stop(watch: early_stopping.ImprovementWatch) -> bool:
    if reason := watch.reason_to_stop():
        print(f"stopped early: {reason}", flush=True)
    return bool(reason)


def _has_begun(checkpoints: Path) -> bool:
    return (checkpoints / "run" / "run.json").is_file()


def command(values: Hyperparameters, checkpoints: Path) -> list[str]:
    run_dir = checkpoints / "run"
    start = [sys.executable, "-m", "async_grpo.cli", "train"]
    if _has_begun(checkpoints):
        return [*start, "--resume", "--run-dir", str(run_dir)]
    start += [str(HERE / "my_trainer.py"), "--run-dir", str(run_dir), "--stop-grace", str(STOP_GRACE_S)]
    start += ["--eval-every", str(values.eval_every)]
    if values.num_gpus == 0:
        return [*start, "--master-device-id", "cpu", "-n", "1"]
    start += ["--worker-device-ids", str(values.num_gpus - 1)]
    if values.num_gpus == 2:
        return [*start, "--master-device-id", "0"]
    start += ["--weights", "host"]  # else rank 0 has the published versions of the whole model on its GPU
    return [*start, "--accelerate-config", str(_accelerate(checkpoints, values))]


def _accelerate(checkpoints: Path, values: Hyperparameters) -> Path:
    """A configuration for GPUs 0 to n-2. It is beside the checkpoints, because a resumed run reads it."""
    ranks = values.ranks
    lines = (HERE / f"{values.accelerate_config}.yaml").read_text().splitlines()
    counts = {"num_processes": ranks, "gpu_ids": ",".join(map(str, range(ranks)))}
    lines = [f"{name}: {counts[name]}" if (name := line.partition(":")[0]) in counts else line for line in lines]
    path = checkpoints / "accelerate.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _export(checkpoints: Path, model: Path, env: dict[str, str], best: early_stopping.Best | None) -> None:
    """Copy a checkpoint's model and tokenizer, without the optimizer's state, to what the service keeps.

    Args:
        best: the evaluation whose checkpoint it is; the last one without it, or where it has none.
    """
    found = sorted(checkpoints.glob("checkpoint-*"), key=_step)
    if not found:
        raise Refused(f"The training has ended, and there is no checkpoint in {checkpoints}.")
    model.mkdir(parents=True, exist_ok=True)
    chosen = next((path for path in found if best is not None and _step(path) == best.step), found[-1])
    for path in chosen.iterdir():
        if path.is_file() and (path.suffix in (".json", ".safetensors", ".jinja", ".model", ".txt")):
            shutil.copy2(path, model / path.name)
    if (chosen / SHARDED).is_dir():
        merge = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
        subprocess.run([*merge, str(chosen / SHARDED), str(model)], env=env, check=True)
    print(f"the model of {chosen.name} is in {model}", flush=True)
    if best is not None and _step(chosen) != best.step:
        print(f"the best evaluation was at step {best.step}, and there is no checkpoint of it", flush=True)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2].split("-")[0])


def _failed(root: Path, reason: str, code: int = 2) -> int:
    """The service shows this file as the reason of a failed job."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    output = root / "output"
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / "failure").write_text(cut(reason))
    except OSError as error:
        print(f"error: and the reason could not be written to {output}: {error.strerror}", file=sys.stderr)
    return code


def cut(reason: str) -> str:
    """As much as the service shows, from the beginning, where the sentence is."""
    return reason if len(reason) <= REASON_CHARACTERS else reason[: REASON_CHARACTERS - 1] + "…"


def ended_with(code: int, lines: Sequence[str]) -> str:
    """The failure of a training: its sentence, and then as much of the log before it as fits."""
    at = next((at for at in reversed(range(len(lines))) if "error:" in lines[at]), None)
    said = " ".join(lines[at:]).partition("error:")[2].strip() if at is not None else " ".join(lines[-1:]).strip()
    before = " ".join(lines[:at] if at is not None else lines[:-1])
    sentence = f"async-grpo train ended with exit code {code}: {said}"
    room = REASON_CHARACTERS - len(sentence) - len(" Before it: …")
    return sentence + (f" Before it: …{before[-room:]}" if room > 0 and before else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
