"""Sweeps run, fail in part, are killed and resumed. Their runs are a few lines long."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from sweep_yard import SweepYard

from async_grpo.api.notebook import Panel
from async_grpo.errors import RunDirError, UsageError
from async_grpo.reports.series import logged
from async_grpo.settings import TrainingSettings
from async_grpo_experiments.slots.ledger import FINISHED, LEDGER, RUNNING, Ledger, Record, read
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.sweeps import plan, report, sweep
from async_grpo_experiments.sweeps.plan import Sweep
from async_grpo_experiments.sweeps.preflight import Preflight
from async_grpo_experiments.sweeps.run_progress import curves
from kit.commands import Says
from kit.waiting import DEADLINE_S, is_gone, until

BAND_PLOT = report.band_plot


def test_each_seed_has_folders_names_caches_and_a_log_of_its_own(yard: SweepYard) -> None:
    assert yard.run(yard.sweep(42, 7, dataset="math")) == 0
    starts = {seed: (arguments, env) for seed, _, arguments, env in yard.starts()}
    arguments, env = starts["42"]
    output = yard.folder / "outputs" / "trl_mine_instance0_seed42"
    assert arguments[:3] == ["train", str(yard.setup), "--distributed"]
    assert ["--run-dir", str(output / "run")] == arguments[arguments.index("--run-dir") :][:2]
    assert f"output_dir={output}" in arguments
    assert "trl_mine_instance0_seed42" in arguments and "mine,async,seed42" in arguments
    assert (env["TRITON_CACHE_DIR"], env["CUDA_VISIBLE_DEVICES"]) == (str(output / "cache" / "triton"), "")
    assert "CUDA_IPC_HANDLE_PATH" not in env
    assert (env["PYTHONHASHSEED"], env["DATASET"]) == ("42", "math")
    different = [name for name in env if env[name] != starts["7"][1][name]]
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "WANDB_DIR"} <= {*different}
    logs = sorted(path.name for path in (yard.folder / "logs" / "parallel_training").iterdir())
    assert logs == ["training_instance0_cpu_seed42.log", "training_instance1_cpu_seed7.log"]


def test_the_report_has_mean_interval_and_picture(
    yard: SweepYard, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "band_plot", BAND_PLOT)
    assert yard.run(yard.sweep(1, 2, 3)) == 0
    folder = yard.folder / "outputs" / "sweep_mine"
    last = json.loads((folder / "report.json").read_text())["evaluations"]["success_rate"][-1]
    assert (last["step"], last["n"], round(last["mean"], 3)) == (5, 3, 0.82)
    assert last["low"] == pytest.approx(0.82 - 4.30265 * 0.01 / 3**0.5, abs=1e-4)
    assert (folder / "agreement.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard" / "mean").glob("events*"))
    said = capsys.readouterr().out
    assert "| 5 | 3 | 0.820 | 0.795 … 0.845 | 0.810 | 0.820 | 0.830 |" in said
    assert "Evaluations were sampled with temperature 0.6. Intervals are cut to 0 … 1.\n\n## success_rate\n" in said


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [("raise", "RuntimeError: reward of step 3"), ("full", "The disk is full"), ("half", "at step 2")],
)
def test_a_run_that_fails_ends_no_other_and_is_named(
    yard: SweepYard, capsys: pytest.CaptureFixture[str], behaviour: str, words: str
) -> None:
    yard.behave(s2=behaviour)
    assert yard.run(yard.sweep(1, 2, 3)) == 1
    said = capsys.readouterr()
    assert words in said.err and "seed 2 failed" in said.err
    assert "n = 2 of 3 seeds (1, 3). Not counted: seed 2, failed:" in said.out
    assert "sweep outputs/sweep_mine --resume" in said.out


def test_a_resumed_sweep_redoes_no_finished_run_and_continues_the_others(yard: SweepYard) -> None:
    yard.behave(s2="raise")
    wanted = yard.sweep(1, 2, 3)
    assert yard.run(wanted) == 1
    yard.behave()
    assert yard.run(plan.load(wanted.folder), resume=True) == 0
    starts = [(seed, "--resume" in arguments) for seed, _, arguments, _ in yard.starts()]
    assert sorted(starts) == [("1", False), ("2", False), ("2", True), ("3", False)]


def test_a_run_that_finished_unnoticed_is_not_run_again(yard: SweepYard) -> None:
    wanted = yard.sweep(1)
    assert yard.run(wanted) == 0
    ledger = Ledger(wanted.folder / "slots.jsonl")  # as if the sweep had been killed before it saw the end
    ledger.change(wanted.runs[0].name, state=RUNNING)
    ledger.close()
    assert yard.run(plan.load(wanted.folder), resume=True) == 0
    assert len(yard.starts()) == 1


def test_what_another_sweep_has_written_is_left_alone(yard: SweepYard) -> None:
    assert yard.run(yard.sweep(1)) == 0
    with pytest.raises(RunDirError, match=r"(?s)outputs/sweep_mine is there already.*--resume.*--run-prefix"):
        yard.run(yard.sweep(2))
    with pytest.raises(RunDirError, match="trl_mine_instance0_seed1 is there already"):
        (yard.folder / "outputs" / "sweep_mine" / "sweep.json").unlink()
        yard.run(yard.sweep(1))
    assert yard.run(yard.sweep(1, run_prefix="again")) == 0
    assert yard.run(yard.sweep(1, start_instance=4)) == 0
    assert yard.run(yard.sweep(1, output_base="elsewhere")) == 0
    assert len({value for _, _, given, _ in yard.starts() for value in given if value.startswith("output_dir=")}) == 4


@pytest.mark.parametrize("at_once", [False, True])
def test_a_sweep_has_the_folders_of_runs_that_still_wait(
    yard: SweepYard, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Another one with overlapping numbers would start in them, and the first would then continue its run."""
    other, run = yard.sweep(2, start_instance=1), sweep._run

    def after_the_other(*given: Any) -> bool:
        with pytest.raises(RunDirError, match="trl_mine_instance1_seed2 is there already"):
            yard.run(other)
        return run(*given)

    monkeypatch.setattr(sweep, "_run", after_the_other)
    if at_once:
        monkeypatch.setattr(sweep, "_refuse_old_outputs", lambda wanted: None)
    assert yard.run(yard.sweep(1, 2)) == 0
    assert not (other.folder / "sweep.json").exists()


def test_versions_are_kept_in_the_folder_of_each_run(yard: SweepYard) -> None:
    assert yard.run(yard.sweep(1, 2, training=TrainingSettings(delta_every=2))) == 0
    folders = {arguments[arguments.index("--delta-dir") + 1] for _, _, arguments, _ in yard.starts()}
    outputs = yard.folder / "outputs"
    kept = outputs.parent / "checkpoints"
    assert folders == {str(kept / f"deltas_mine_instance{i}_seed{i + 1}") for i in range(2)}


SWEEP = """
import sys
from pathlib import Path
import pytest
from sweep_yard import SweepYard, play
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.sweeps import plan, report, sweep
from async_grpo_experiments.sweeps.preflight import Preflight
folder = Path(sys.argv[1])
play(pytest.MonkeyPatch(), folder)
yard = SweepYard(folder) if sys.argv[2] == "new" else None
if yard is not None:
    yard.behave(s2="deaf", s3="hang")
    sys.exit(yard.run(yard.sweep(1, 2, 3)))
"""


@pytest.fixture
def started(yard: SweepYard) -> Iterator[subprocess.Popen[str]]:
    """A sweep in a process of its own: seed 1 finishes, seed 2 is deaf to SIGTERM, seed 3 hangs. None outlives a test
    that fails.
    """
    here = Path(__file__).parent
    path = os.pathsep.join((str(here.parents[2] / "src"), str(here)))
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP, str(yard.folder), "new"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ledger = yard.folder / "outputs" / "sweep_mine" / "slots.jsonl"
    with process:
        try:
            until(lambda: sum("began" in log.read_text() for log in yard.folder.glob("logs/*/*.log")) == 3)
            until(lambda: [one.state for one in read(ledger).values()] == [FINISHED, RUNNING, RUNNING])
            yield process
        finally:
            process.kill()
            for _, pid, _, env in yard.starts():
                end(pid, env)


def end(pid: int, env: dict[str, str]) -> None:
    """End a fake run, if the process of this number still is one."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.environ() == env:
            process.kill()


def test_a_sweep_that_is_killed_is_resumed_and_leaves_no_orphan(
    yard: SweepYard, started: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started
    with pytest.raises(RunDirError, match="is in use by another sweep"):
        yard.run(yard.sweep(1, 2, 3))
    process.kill()
    process.communicate()
    pids = {seed: pid for seed, pid, _, _ in yard.starts()}
    until(lambda: is_gone(pids["3"]))  # the kernel told it
    assert not is_gone(pids["2"])
    monkeypatch.setattr("async_grpo_experiments.sweeps.sweep.GRACE_S", 0.2)
    yard.behave()
    assert yard.run(plan.load(Path("outputs/sweep_mine")), resume=True) == 0
    assert is_gone(pids["2"])
    assert sorted(seed for seed, *_ in yard.starts()) == ["1", "2", "2", "3", "3"]
    assert "n = 3 of 3 seeds" in capsys.readouterr().out


def test_ctrl_c_twice_kills_what_is_deaf(yard: SweepYard, started: subprocess.Popen[str]) -> None:
    process = started
    process.send_signal(signal.SIGINT)
    pids = {seed: pid for seed, pid, _, _ in yard.starts()}
    until(lambda: is_gone(pids["3"]))
    assert process.poll() is None and not is_gone(pids["2"])
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert is_gone(pids["2"])
    assert "n = 1 of 3 seeds (1). Not counted: seed 2, stopped: it was asked to stop; seed 3, stopped:" in said


def test_a_port_that_is_taken_is_said_and_the_next_free_pair_is_chosen(
    yard: SweepYard, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Preflight(places=[Place(name="a")], offline=False, serves=True)
    monkeypatch.setattr("async_grpo_experiments.sweeps.sweep.preflight", lambda *_: serving)
    taken = lambda port: port in (8000, 51300)  # noqa: E731
    monkeypatch.setattr(sweep, "is_free", lambda port: not taken(port))
    assert yard.run(yard.sweep(1, 2, 3)) == 0
    given = {seed: [text for text in arguments if text.startswith("vllm_")] for seed, _, arguments, _ in yard.starts()}
    assert given == {
        "1": ["vllm_server_port=8003", "vllm_group_port=51500"],
        "2": ["vllm_server_port=8004", "vllm_group_port=51600"],
        "3": ["vllm_server_port=8002", "vllm_group_port=51400"],
    }
    said = capsys.readouterr().out
    assert "trl_mine_instance0_seed1: port 8000 is taken by another program" in said
    assert "trl_mine_instance1_seed2 takes the next free ports, 8004 and 51600" in said


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not sweep.is_free(port)
        with pytest.raises(UsageError, match="Choose another --base-port"):
            sweep._free_ports([(port, port)], what="a run", say=lambda text: None)


# --- Files of a sweep that somebody else wrote, or that say what no run says -----------------------------------

HUGE = "1" + "0" * 400


@pytest.fixture
def ended(tmp_path: Path) -> Sweep:
    """Two finished runs."""
    (setup := tmp_path / "my_trainer.py").write_text("def get_trainer(): ...\n")
    made = Sweep(setup=str(setup), seeds=(1, 2), name="mine", output_base=str(tmp_path / "outputs"))
    made.folder.mkdir(parents=True, mode=0o700)
    plan.write(made)
    records = [Record(task=run.name, state=FINISHED) for run in made.runs]
    lines = [json.dumps({"task": record.task, "state": record.state}) for record in records]
    (made.folder / LEDGER).write_text("\n".join(lines) + "\n")
    for run in made.runs:
        run.run_dir.mkdir(parents=True)
    return made


@pytest.mark.parametrize("values", [{"0": [1.0], "1": []}, {"0": [1.0, 1.0, 1.0]}, {"0": 3, "1": "x"}])
def test_values_by_problem_that_are_no_pairs_are_left_out(ended: Sweep, values: dict[str, Any], refused: Says) -> None:
    figure = {"value": 1.0, "low": None, "high": None, "problems": 2}
    line = {"run_id": "r", "step": 1, "seconds": 1.0, "replicates": 1, "sampling": {}, "first_seq": 0}
    for run in ended.runs:
        found = {**line, "figures": {"success_rate": figure}, "tasks": {}, "failed": {}, "by_problem": values}
        (run.run_dir / "evaluations.jsonl").write_text(json.dumps(found) + "\n")
    assert "no evaluation in common" in refused("compare", ended.folder, ended.folder)


def test_numbers_of_hundreds_of_digits_are_left_out(ended: Sweep) -> None:
    run = ended.runs[0]
    lines = [f'{{"step":1,"loss":1,"reward":{HUGE}}}', f'{{"step":1,"eval_reward":{HUGE}}}']
    (run.run_dir / "metrics.jsonl").write_text("\n".join([*lines, '{"step":2,"loss":1,"reward":0.5}\n']))
    assert curves(run).reward == {2: 0.5}
    (panel := Panel(run.run_dir))._read()
    assert panel._rewards == {2: 0.5}
    assert dict(logged(json.loads(lines[0]))) == {"train/loss": 1.0}


def _others_may_write(folder: Path) -> Path:
    folder.chmod(0o777)
    return folder


def _through_a_link(folder: Path) -> Path:
    (link := folder.parent / "sweep_link").symlink_to(folder)
    return link


def _planted(folder: Path) -> Path:
    """Its record names a folder that would be made new, and so belong to whoever continues the sweep."""
    planted = folder.parent / "planted"
    planted.mkdir(mode=0o700)
    record = json.loads((folder / "sweep.json").read_text())
    (planted / "sweep.json").write_text(json.dumps({**record, "name": "x/../../elsewhere"}))
    return planted


@pytest.mark.parametrize("plant", [_others_may_write, _through_a_link, _planted])
def test_a_sweep_that_others_could_have_written_is_not_continued(
    ended: Sweep, plant: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    monkeypatch.setattr(
        "async_grpo_experiments.sweeps.sweep.run_sweep", lambda *_, **__: pytest.fail("it was continued")
    )
    told = refused("sweep", str(plant(ended.folder)), "--resume")
    assert told.startswith("error: ") and "--run-dir" not in told, "a sweep has no such option"


@pytest.mark.parametrize("wrong", [{"seeds": [1, -1]}, {"seeds": [1, 2**32]}, {"arguments": []}])
def test_a_record_with_no_seed_or_of_a_former_version_is_refused(ended: Sweep, wrong: dict[str, Any]) -> None:
    record = json.loads((ended.folder / "sweep.json").read_text())
    (ended.folder / "sweep.json").write_text(json.dumps({**record, **wrong}))
    with pytest.raises(RunDirError, match=r"is no seed: one is from 0 to|has an unknown field 'arguments'"):
        plan.load(ended.folder)


def test_a_sweep_is_found_from_within_its_own_folder(ended: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ended.folder)
    (ended.folder / "tensorboard").mkdir()
    for folder in (Path(), Path("tensorboard/..")):
        found = plan.own(plan.find(folder))
        assert (found.folder, found.runs[0].output) == (ended.folder, ended.runs[0].output)


def test_a_sweep_whose_folder_was_renamed_is_refused_by_either_name_with_what_to_do(
    ended: Sweep, refused: Says
) -> None:
    renamed = ended.folder.rename(ended.folder.with_name("old"))
    for command, words in (
        ([renamed], f"beside its runs: rename it to {ended.folder}, then continue."),
        ([ended.folder], f"{ended.folder} does not exist: neither a sweep's folder nor a setup file"),
        ([ended.setup, "--output-base", ended.folder.parent], "sweep_my_trainer does not exist. Name the folder that"),
    ):
        assert words in refused("sweep", *command, "--resume")
