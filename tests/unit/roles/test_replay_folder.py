"""Replays: into a folder of their own, by another correction of groups that vLLM has sampled, and stopped by Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.archive.history import ConsumptionRecord, Sampler, ServerProcess, read_record
from async_grpo.cli import main
from async_grpo.errors import RunDirError, UnsupportedError, UsageError
from async_grpo.roles import replay
from async_grpo.roles.replay import ReplayOptions, made, run_replay
from async_grpo.rundir.paths import FINISHED, RunState
from async_grpo.settings import TrainingSettings
from async_grpo.training import reporting, trl_trainer
from async_grpo.training.corrections import checks, trl_loss
from async_grpo.training.corrections.checks import sampled_with
from async_grpo.training.corrections.rule import rule
from kit.archived_run import ArchivedRun
from kit.plans import planned


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path: str, content: str = "of the run") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("outputs/checkpoint-8", "has files in it"),  # the weights of the run's only checkpoint were replaced
        ("worker", "has files in it"),  # its metrics.jsonl was displaced
        ("outputs/checkpoint-9", "name of a checkpoint"),
        ("outputs/checkpoint-8/replay", "which is a run's"),
        ("a_file", "is no folder"),
        ("dangling", "is no folder"),
    ],
)
def test_a_folder_in_use_is_refused_and_stays(folder: str, says: str) -> None:
    files = [put("outputs/checkpoint-8/model.safetensors"), put("worker/run.json"), put("a_file")]
    Path("dangling").symlink_to("nowhere")
    before = sorted(Path().rglob("*"))
    with pytest.raises(UsageError, match=says), made(Path(folder)):
        pytest.fail("it was given out")
    assert [file.read_text() for file in files] == ["of the run"] * 3
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("folder", ["new/folder", "empty", "linked"])
def test_a_new_or_empty_folder_is_taken(folder: str) -> None:
    Path("empty").mkdir()
    Path("elsewhere").mkdir()
    Path("linked").symlink_to("elsewhere")
    with made(Path(folder)) as taken:
        (taken / "model.safetensors").write_text("replayed")
    assert (Path(folder) / "model.safetensors").read_text() == "replayed"


def test_each_default_replay_has_a_number_of_its_own() -> None:
    taken = []
    for _ in range(3):
        with made(None) as folder:
            put(str(folder / "metrics.jsonl"), folder.name)
            taken.append(folder)
    assert taken == [Path("outputs/replay-1"), Path("outputs/replay-2"), Path("outputs/replay-3")]
    assert [(folder / "metrics.jsonl").read_text() for folder in taken] == ["replay-1", "replay-2", "replay-3"]


@pytest.mark.parametrize("named", [None, Path("mine")])
def test_a_replay_that_wrote_nothing_leaves_no_folder(named: Path | None) -> None:
    with pytest.raises(KeyboardInterrupt), made(named) as folder:
        raise KeyboardInterrupt
    assert not folder.exists()


def test_the_run_itself_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    """Its setup file does not exist: building the trainer would say so."""
    run = ArchivedRun(tmp_path)
    run.use(1, [0, 1])
    metrics = run.run.metrics.read_text()
    with pytest.raises(UsageError, match="has files in it"):
        run_replay(ReplayOptions(run_dir=run.root, output_dir=run.root))
    assert run.run.metrics.read_text() == metrics


def test_a_run_whose_audit_is_not_clean_is_not_replayed(tmp_path: Path) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0, 1])
    run.use(2, [1, 2])
    with pytest.raises(RunDirError, match=r"its audit is not clean: Group 1 was used 2 times.*async-grpo audit"):
        run_replay(ReplayOptions(run_dir=run.root))
    assert not Path("outputs").exists()


# --- A replay by another correction than the run's, of groups that vLLM has sampled ------------------------------


def trainer_with(top_k: int = 20) -> Any:
    args = {"temperature": 1.0, "top_p": 1.0, "top_k": top_k, "min_p": None, "repetition_penalty": 1.0}
    return SimpleNamespace(args=SimpleNamespace(**args, generation_kwargs=None, vllm_structured_outputs_regex=None))


def check(to: str, run: str, *, generator: str | None = "vllm", top_k: int = 20, **found: Any) -> None:
    """Check the sampler of a run whose last process did not record how it sampled, and those `before` a resume."""
    plan = planned(generator=generator, correction=run)
    state = RunState(run_id="r", state=FINISHED, started="", plan=plan, generator=found.get("resolved"))
    processes = [ServerProcess(None, 4, sampled) for sampled in (*found.get("before", ()), None)]
    sampled = replay._sampled(processes, trainer_with(top_k), state)
    replay._check_groups_suit(rule(to, None, None, None), sampled)


@pytest.mark.parametrize("run", ["none", "trl"])
@pytest.mark.parametrize(("asked", "found"), [("vllm", None), (None, "vllm"), (None, "vllm server")])  # of an older run
def test_groups_without_kept_tokens_are_not_replayed_by_a_correction_that_needs_them(
    run: str, asked: str | None, found: str | None
) -> None:
    with pytest.raises(UnsupportedError, match=rf"--correction {run} with top_k=20.*decoupled would be biased"):
        check("decoupled", run, generator=asked, resolved=found)


def test_what_has_the_log_probabilities_that_are_needed_is_replayed(warnings: list[str]) -> None:
    check("decoupled", "bypass")  # its groups name the tokens
    check("decoupled", "none", top_k=0)
    check("decoupled", "none", generator="hf")
    check("decoupled", "none", generator=None, resolved="hf")
    check("none", "trl")
    check("decoupled", "none", generator=None, top_k=0)  # whatever sampled them
    assert not warnings


def test_a_run_that_does_not_say_what_sampled_it_is_replayed_with_a_warning(warnings: list[str]) -> None:
    check("decoupled", "none", generator=None)
    assert "the run does not say what sampled its groups" in warnings[0]
    assert "(top_k=20), and --correction decoupled is biased" in warnings[0]


@pytest.mark.parametrize(
    "resumed",
    [
        {"generator": "hf", "run": "none"},
        {"generator": "vllm", "run": "bypass"},  # only later groups name the tokens
        {"generator": "vllm", "run": "none", "top_k": 0},
    ],
)
def test_groups_of_before_a_resume_are_judged_by_how_they_were_sampled(tmp_path: Path, resumed: dict[str, Any]) -> None:
    before = sampled_with(trainer_with(20), "none", "vllm")
    with pytest.raises(UnsupportedError, match=r"none with top_k=20 for a part of it \(a resume changed that\)"):
        check("decoupled", **resumed, before=(_written_and_read(tmp_path, before),))
    check("none", **resumed, before=(before,))


def _written_and_read(folder: Path, sampled: Sampler) -> Sampler | None:
    path = folder / "consumed.jsonl"
    ConsumptionRecord(path, run_id="r", resumed_from=None, max_staleness=4, sampled=sampled).close()
    (process,), broken = read_record(path, "r")
    assert process.sampled == sampled
    assert not broken
    return process.sampled


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ("tis", "token", 0.0, 3.0)),
        ({"correction_min": 0.5}, ("tis", "token", 0.5, 3.0)),
        ({"correction": "icepop"}, ("icepop", "token", 0.5, 5.0)),
        ({"correction": "tis", "correction_level": "geometric"}, ("tis", "geometric", 0.0, 2.0)),
    ],
    ids=str,
)
def test_options_of_the_runs_correction_are_not_those_of_another_one(asked: dict[str, Any], expected: Any) -> None:
    run = planned(correction="tis", correction_max=3.0).training
    found = replay._rule(replay.ReplayOptions(run_dir=Path("run"), **asked), run)
    assert (found.name, found.level, found.least, found.most) == expected


# --- Ctrl-C in a replay says what became of it -------------------------------------------------------------------


@pytest.mark.parametrize(("done", "says"), [(3, "after 3 of 9 steps and saved no weights"), (9, "may not be complete")])
def test_the_steps_that_were_done_are_told(
    done: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    for module, name in ((checks, "check"), (trl_trainer, "make_async"), (reporting, "report")):
        monkeypatch.setattr(module, name, nothing)
    monkeypatch.setattr(trl_loss, "has_own_loss", lambda trainer: False)
    monkeypatch.setattr(trl_trainer, "fit", interrupted if done < 9 else nothing)
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=done, max_steps=9), save_model=interrupted)
    with pytest.raises(replay.ReplayStoppedError, match=says):
        replay._train(trainer, iter([]), rule("bypass", None, None, None), TrainingSettings(), tmp_path)


def test_before_the_first_step_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: replay.ReplayOptions) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(replay, "run_replay", interrupted)
    assert main(["replay", str(tmp_path), "--device", "cpu"]) == 130
    assert "before its first step: nothing was written" in capsys.readouterr().err
