"""What a real stage does, in a process of its own.

    python -m async_grpo_experiments.runner.stages ROOT JOB KIND TOKEN

Sampling and evaluation are `async-grpo generate` and `async-grpo evaluate`, children of this process, with a setup file
that is written here. Their run directories lie in the job's folder, as does that of a training, and are continued by a
next attempt at the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk

from async_grpo.archive.disk_space import retry_while_full
from async_grpo.archive.groups import FinishedGroups
from async_grpo.errors import AsyncGRPOError, UsageError
from async_grpo.evals.estimators import Estimate
from async_grpo.evals.eval_ledger import Evaluated
from async_grpo.formatting import printable
from async_grpo.rundir.files import write_json
from async_grpo.rundir.reading import read_end, read_object
from async_grpo.rundir.shape import as_json, shaped
from async_grpo.setup.generated import GENERATED
from async_grpo.setup.process import end_with_parent, rank_of_launch
from async_grpo_experiments.algorithms.protocols import GRPO_RUN, Continuations, Cut, collect
from async_grpo_experiments.algorithms.rows import Rows
from async_grpo_experiments.cut_plans import requests_of
from async_grpo_experiments.problems.table import ProblemSet
from async_grpo_experiments.reward_models import load_reward_model, reward_by, score
from async_grpo_experiments.runner import states
from async_grpo_experiments.runner.config import ALGORITHMS, GUIDED, OWN_PROCESSES, ExperimentConfig, checked
from async_grpo_experiments.runner.config_files import config_of
from async_grpo_experiments.runner.graph import FOLDERS, ExperimentJob, jobs_of
from async_grpo_experiments.runner.peaks import USAGE
from async_grpo_experiments.runner.results import RESULT, TRAINED, EvaluatedSet, TrainedNote
from async_grpo_experiments.runner.stage_settings import check, problems_of, settings_of
from async_grpo_experiments.slots.foreground import stopped_by_signals
from async_grpo_experiments.slots.schedule import OUT_OF_MEMORY
from async_grpo_experiments.slots.starter import held_by_us

ROWS, SAMPLES = "rows.arrow", "samples"
_LAST_WORDS_BYTES = 10_000  # of a process that has ended
_LEAVES = ("head", "model", "proxy")  # folders that a training may leave
SETUP_FILE = f'''{GENERATED}"""The setup file of one stage."""

from pathlib import Path

from async_grpo_experiments.runner.stages import trainer_of


def get_trainer():
    return trainer_of(Path(__file__).with_suffix(".json"))
'''


class Work:
    """One job's work: the algorithm, the problems, the paths of its files."""

    def __init__(self, config: ExperimentConfig, job: ExperimentJob, root: Path = Path()) -> None:
        self.config, self.job, self.root = config, job, root
        self.folder = root / "jobs" / job.id

    @cached_property
    def algorithm_settings(self) -> Any:
        return settings_of(self.config, self.job.algo, self.job.family, self.job.seed)

    @cached_property
    def problems(self) -> ProblemSet:
        return problems_of(self.config, self.job.dataset)

    @cached_property
    def algorithm(self) -> Any:
        module, name, _ = ALGORITHMS[self.job.algo]
        kind = getattr(import_module(f"async_grpo_experiments.algorithms.{module}"), name)
        if self.job.algo == "GRPO":
            reward, dataset = self.problems.reward, self.job.dataset
            name = f"{reward.__module__}:{reward.__qualname__}" if reward else self.reward_model(dataset)
            return kind(self.algorithm_settings, self.problems.rows, name)
        if self.job.algo == "GRPO-HF":
            return kind(self.algorithm_settings, self.problems.rows)
        return kind(self.algorithm_settings)

    def trained(self, round_number: int) -> Path:
        """The head or the model that a round of this line has left."""
        folder = self.root / "jobs" / self.job.at(round_number) / FOLDERS["train"]
        return folder / ("head" if self.job.algo in GUIDED else "model")

    @property
    def seed(self) -> int:
        """What this round is sampled with: two rounds must not sample the same."""
        return (self.job.seed + 7919 * self.job.round) % 2**32

    # The stages. Each leaves its files in `partial`.

    def generate(self, partial: Path) -> None:
        problems = len(self.problems.rows)
        plan = self.algorithm.plan
        if not next(plan(problems, self.job.round), None):
            self.algorithm.rows([], self.job.round).save(partial / ROWS)
            return
        out = self.folder / SAMPLES
        run = self._begin(partial, "generating", out)
        if not out.exists():
            rolls_in_guided = self.job.round > 1 and self.job.algo in GUIDED
            setup = self._setup_file(run, guided_by=self.trained(self.job.round - 1) if rolls_in_guided else None)
            self._child("generate", self.reference, setup, run, "--out", str(out))
        shutil.copytree(out, partial / SAMPLES)
        samples = load_from_disk(str(out))
        answers = SampledAnswers(samples, self._rewards(samples), verified=self.problems.verified)
        continuations = collect(plan(problems, self.job.round), answers.answer)
        self.algorithm.rows(continuations, self.job.round).save(partial / ROWS)

    def train(self, partial: Path) -> None:
        rank, _ = rank_of_launch(os.environ)
        out = self.folder / "training"
        if rank == 0:  # the others wait for it when they build their trainer
            self._begin(partial, "training")
            for left in out.glob("*"):
                if left.name in _LEAVES:  # not whole, or it would be in a complete folder
                    shutil.rmtree(left)
        earlier = range(1, self.job.round + 1)
        data = [self.root / "jobs" / self.job.at(one) / FOLDERS["generate"] / ROWS for one in earlier]
        start = self.trained(self.job.round - 1) if self.job.round > 1 else None
        logs = _LogsOfRun(out / GRPO_RUN)
        try:
            found = self.algorithm.train(Rows.together(map(Rows.load, data)), start, out=out)
        except AsyncGRPOError as error:
            if logs.say_out_of_memory():
                raise StageOutOfMemory(f"out of memory in the run {out / GRPO_RUN}: {error}") from error
            raise
        peak = 0 if self.job.algo in OWN_PROCESSES else _memory_summary(rank)
        if rank > 0:
            return
        for name in _LEAVES:
            if (out / name).exists():
                shutil.copytree(out / name, partial / name)
        write_json(partial / TRAINED, as_json(TrainedNote(steps=found.steps, loss=found.loss)))
        if peak:
            write_json(partial / USAGE, {"peak_bytes": peak})

    def evaluate(self, partial: Path) -> None:
        found: list[EvaluatedSet] = []
        for dataset in self.config.evaluated_sets(self.job.dataset):
            figures = self.folder / f"evaluating_{dataset}.json"
            run = self._begin(partial, f"evaluating_{dataset}", figures)
            guided = self.job.algo in GUIDED
            model = self.reference if guided or not self.job.algo else str(self.trained(self.job.round))
            if not figures.exists():
                head = self.trained(self.job.round) if guided else None
                setup = self._setup_file(run, guided_by=head, evaluated=dataset)
                self._child("evaluate", model, setup, run, "--json", str(figures), *self._sampled_with(guided))
            more = {} if model == self.reference else self._divergence(run, model)
            found += [replace(one, figures=one.figures | more) for one in _evaluated(dataset, read_object(figures))]
        write_json(partial / RESULT, {"evaluations": [*map(as_json, found)]})

    def _rewards(self, samples: Iterable[Mapping[str, Any]]) -> list[float]:
        """Return the rewards of the samples: their own, or the scores of the reward model."""
        if self.problems.reward is not None:
            return [row["reward"] for row in samples]
        model = load_reward_model(self.reward_model(self.job.dataset))
        return score(samples, model, self.config.data_collection.reward_batch_size)

    def reward_model(self, dataset: str) -> str:
        name = self.config.datasets[dataset].reward_model
        assert name is not None, f"{dataset} has no reward, which `check` refuses"
        return name

    def _divergence(self, run: Path, model: str) -> dict[str, Estimate]:
        from async_grpo_experiments.algorithms.training import load_policy
        from async_grpo_experiments.runner.trained_divergence import divergence_of_groups

        device = "cuda" if torch.cuda.is_available() else "cpu"
        policy, reference = (
            load_policy(name, self.algorithm_settings).to(device).eval() for name in (model, self.reference)
        )
        groups = sorted((found.group for found in FinishedGroups(run).evaluated()), key=lambda group: group.job.seq)
        return divergence_of_groups(groups, policy, reference, self.config.generation.temperature)

    def tidy(self) -> None:
        """Remove what complete folders have a copy of, and what TRL has made for nothing."""
        for folder in (SAMPLES, "unused", *(f"training/{name}" for name in (*_LEAVES, "checkpoints"))):
            if (self.folder / folder).exists():
                shutil.rmtree(self.folder / folder)

    @property
    def reference(self) -> str:
        return self.config.models[self.job.family].ref

    def _sampled_with(self, guided: bool) -> Iterable[str]:
        evaluation = self.config.evaluation
        ks = sorted({1, evaluation.num_samples})
        yield from ("--eval-replicates", str(evaluation.num_samples), "--eval-k", ",".join(map(str, ks)))
        yield from ("--eval-temperature", str(self.config.generation.temperature))
        yield from ("--eval-top-p", "1", "--eval-top-k", "0")
        if guided and evaluation.etas:
            yield from ("--eval-eta", ",".join(f"{eta:g}" for eta in evaluation.etas))

    def _begin(self, partial: Path, name: str, *others: Path) -> Path:
        """The folder for what may be continued. An attempt that continues nothing finds nothing there."""
        folder, mark = self.folder / name, states.work_of(partial) / name
        if not mark.exists():
            for old in (folder, *others):
                if old.exists():
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
            mark.parent.mkdir(exist_ok=True)
            mark.touch()
        return folder

    def _setup_file(self, run: Path, *, guided_by: Path | None, evaluated: str = "") -> Path:
        path = self.folder / f"{run.name}.py"
        guided = "" if guided_by is None else str(guided_by.absolute())
        keys = {"root": str(self.root.absolute()), "job": self.job.id, "guided_by": guided, "evaluated": evaluated}
        write_json(path.with_suffix(".json"), keys)
        path.write_text(SETUP_FILE)
        return path

    def _child(self, command: str, model: str, setup: Path, run: Path, *more: str) -> None:
        """Run one command to its end. `AsyncGRPOError`: it failed."""
        arguments = [command, model, "--config", str(setup), "--run-dir", str(run), *more]
        arguments += ["--deterministic"] if self.config.system.deterministic else []
        visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
        if visible:  # each gets a worker, also that of the weights
            arguments += ["--worker-device-ids", ",".join(map(str, range(len(visible))))]
        elif len(os.sched_getaffinity(0)) == 1:
            arguments += ["--num-workers", "1"]  # a second one would share the core
        arguments += ["--resume"] if run.exists() else []
        logs = _LogsOfRun(run)
        child = subprocess.Popen([*held_by_us(), sys.executable, "-Pm", "async_grpo.cli", *arguments])
        asked: list[int] = []

        def stop(number: int, frame: object) -> None:
            asked.append(number)
            child.terminate()

        with stopped_by_signals(stop):
            code = child.wait()
        if asked:  # its code would not say so: what it has sampled is kept, and that is 0
            raise StageError(f"async-grpo {command} was asked to stop. Another attempt continues it, from {run}.")
        if code and logs.say_out_of_memory():
            raise StageOutOfMemory(f"out of memory in async-grpo {command}: its log is above, and in {run}.")
        if code:
            raise StageError(f"async-grpo {command} ended with exit code {code}: its log is above, and in {run}.")


class StageError(AsyncGRPOError):
    """A command that a stage started has failed."""

    exit_code = 1


class StageOutOfMemory(StageError):
    """A command that a stage started had too little memory."""

    exit_code = OUT_OF_MEMORY


class _LogsOfRun:
    """The logs of a run's processes, from now on: an earlier attempt wrote into the same."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._before = {log: log.stat().st_size for log in run.glob("log_*.txt")}

    def say_out_of_memory(self) -> bool:
        """Whether a process has ended with it: it is in the last that it wrote."""
        for log in self._run.glob("log_*.txt"):
            new = log.stat().st_size - self._before.get(log, 0)
            if new > 0 and b"OutOfMemoryError" in read_end(log, min(new, _LAST_WORDS_BYTES))[0]:
                return True
        return False


def _evaluated(dataset: str, found: Mapping[str, Any]) -> Iterable[EvaluatedSet]:
    """What `async-grpo evaluate --json` wrote, one evaluation for each strength."""
    for one in shaped(dict[str, Evaluated], found.get("models"), "models").values():
        eta = one.sampling.get("eta")
        yield EvaluatedSet(
            dataset=dataset,
            eta=None if eta in (None, "off") else float(eta),
            figures=one.figures,
            by_problem={problem: tuple(means) for problem, means in one.by_problem.items()},
            failed=len(one.failed),
        )


def trainer_of(path: Path) -> Any:
    """The trainer of a stage's setup file, in each process that samples."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    keys = read_object(path)
    work = work_of(Path(keys["root"]), keys["job"])
    config = work.config
    sets = problems_of(config, keys["evaluated"], evaluated=True) if keys["evaluated"] else work.problems
    rows, tokenizer = Dataset.from_list(sets.rows), AutoTokenizer.from_pretrained(work.reference)
    reward = sets.reward or unscored
    if sets.reward is None and keys["evaluated"]:
        reward = reward_by(work.reward_model(keys["evaluated"]), tokenizer)
    batch, on_gpu = max(2, config.generation.batch_size), torch.cuda.is_available()
    trainer: Any = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(work.reference, attn_implementation=config.system.attn_impl),
        reward,
        args=GRPOConfig(
            output_dir=str(work.folder / "unused"),
            per_device_train_batch_size=batch,
            num_generations=batch,
            max_completion_length=config.generation.max_new_tokens,
            temperature=config.generation.temperature,
            beta=0.0,
            seed=work.seed,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            report_to="none",
        ),
        train_dataset=rows,
        eval_dataset=rows if keys["evaluated"] else None,
        processing_class=tokenizer,
    )
    if not keys["evaluated"]:
        unguided = {"eta": "off"} if keys["guided_by"] else None
        plan = work.algorithm.plan
        trainer.generation_plan = requests_of(
            lambda problems: plan(problems, work.job.round), trainer, unguided=unguided
        )
    if keys["guided_by"]:
        from async_grpo_experiments.guidance.setup import guided

        trainer = guided(trainer, head=keys["guided_by"], **work.algorithm.guidance())
    return trainer


def unscored(completions: Sequence[Any], **_: Any) -> list[float]:
    """The reward while it is sampled where a reward model scores afterwards."""
    return [0.0] * len(completions)


def _memory_summary(rank: int) -> int:
    """Print the memory of this process's GPU; returns the most that it had reserved, 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    device = torch.cuda.current_device()
    _, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
    if rank == 0:
        print("GPU Memory Summary:")
    print(
        f"  GPU {device}: {allocated / 1e9:.2f} GB allocated, {reserved / 1e9:.2f} GB reserved, "
        f"{total / 1e9:.2f} GB total",
        flush=True,
    )
    return reserved


def work_of(root: Path, job: str) -> Work:
    config = config_of(root)
    found = next((one for one in jobs_of(config) if one.id == job), None)
    if found is None:
        raise UsageError(f"There is no job {job} in {root}.")
    return Work(config, found, root)


class SampledAnswers:
    """Answers to the cuts of a plan: the rows that `async-grpo generate` has sampled by the same plan.

    Args:
        rewards: one for each row.
        verified: whether a reward is 1 for what is right and 0 for all else.
    """

    def __init__(self, samples: Iterable[Mapping[str, Any]], rewards: Sequence[float], *, verified: bool) -> None:
        self._by_request: dict[tuple[int, int, int], list[Mapping[str, Any]]] = {}
        for row, reward in zip(samples, rewards, strict=True):
            key = row["wave"], row["problem"], row["request"]
            self._by_request.setdefault(key, []).append({**row, "reward": reward})
        self._wave, self._verified = -1, verified

    def answer(self, cuts: Sequence[Cut]) -> list[Continuations]:
        """Answer the next wave of cuts. A cut that failed has no answer."""
        self._wave += 1
        before: dict[int, int] = {}
        found = []
        for cut in cuts:
            request = before[cut.problem] = before.get(cut.problem, -1) + 1
            if rows := self._by_request.get((self._wave, cut.problem, request)):
                found.append(_continuations(cut, rows, self._verified))
        return found


def _continuations(cut: Cut, rows: Sequence[Mapping[str, Any]], verified: bool) -> Continuations:
    rewards = tuple(float(row["reward"]) for row in rows)
    return Continuations(
        cut=cut,
        prompt=tuple(rows[0]["prompt_ids"]),
        completions=tuple(tuple(row["completion_ids"][len(cut.prefix) :]) for row in rows),
        rewards=rewards,
        correct=tuple(reward == 1 for reward in rewards) if verified else (),
    )


def main(arguments: Sequence[str]) -> int:
    """Run one stage; returns its exit code."""
    partial, (rank, ranks) = None, rank_of_launch(os.environ)
    if ranks > 1:
        end_with_parent(os.getppid())  # accelerate's launcher ends its processes, unless it is killed
    try:
        if list(arguments) == ["check"]:
            check(checked(json.loads(sys.stdin.read())))
            return 0
        if list(arguments) == ["forecast"]:
            from async_grpo_experiments.runner.forecast import forecast

            found = forecast(checked(json.loads(sys.stdin.read())))
            print(json.dumps({kind: asdict(one) for kind, one in found.items()}))
            return 0
        root, job, kind, token = arguments
        work = work_of(Path(root), job)
        folder = work.folder / FOLDERS[kind]
        partial = states.partial_of(folder, token)
        if rank == 0:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            device = f"GPU {visible}" if visible else "the CPU"
            print(f"{job}.{kind} on {device}, CUDA_VISIBLE_DEVICES={visible!r}", flush=True)
        manifest = states.manifest_of(folder)
        if manifest is not None and manifest.attempt == token:  # a cluster starts a command again that it has lost
            return 0
        if not partial.exists():
            raise UsageError(f"There is no attempt {token} at {folder}: run.log has the newest command line.")
        if rank == 0:
            states.empty(partial)
        {"generate": work.generate, "train": work.train, "evaluate": work.evaluate}[kind](partial)
        if rank == 0:
            retry_while_full(lambda: states.finish(partial), should_stop=lambda: False)
            work.tidy()
    except AsyncGRPOError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError" or partial is None:
            raise
        (partial / states.RAN_OUT).touch()  # accelerate's launcher has an exit code of its own
        print(printable(f"error: out of memory: {error}"), file=sys.stderr)
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
