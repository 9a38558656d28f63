"""What a sweep's command line is understood as, and what it is refused for, before anything is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_grpo.checks.plan.trainer_facts import Look, Parameters, Question, TrainerFacts
from async_grpo.errors import UsageError
from async_grpo.settings import TrainingSettings, WorkerSettings
from async_grpo_experiments.sweeps import plan, preflight
from async_grpo_experiments.sweeps.plan import Sweep
from async_grpo_experiments.sweeps.preflight import Preflight, wandb_is_offline
from async_grpo_experiments.sweeps.sweep import command
from kit.commands import Says
from kit.trainer_facts import facts

SETUP = "def get_trainer(): ...\n"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer_setup_mine.py").write_text(SETUP)
    return tmp_path / "trainer_setup_mine.py"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "1,2,1"], "--seeds has 1 twice"),
        (["--seeds", "1,x"], "must be a whole number from 0 to 2^32 - 1"),
        (["--seeds", "-1"], "must be a whole number from 0 to 2^32 - 1"),
        (["--gpus-per-run", "2"], "2 GPUs from GPU 0 on were asked for, and no GPUs can be seen here"),
        (["--set", "learning_rate=fast"], "learning_rate must be a number"),
        (["--set", "learning_rat=1"], "Did you mean learning_rate?"),
        (["--set", "output_dir=mine"], "--set output_dir: each run of a sweep has its own"),
        (["--mode", "trl", "--max-staleness", "2"], "--max-staleness: plain TRL (--mode trl) has no such option"),
        (["--delta-dir", "here"], "unrecognized arguments: --delta-dir"),
        (["--delta-keep", "9"], "--delta-keep: no versions are kept without --delta-every"),
        (["--base-port", "30000"], "must be from 1024 to 22000"),
        (["--base-port", "22000", "--start-instance", "300"], "leaves no port below 65535"),
        (["--run-prefix", "../up"], "must be letters, digits"),
        (["--resume"], "outputs/sweep_mine does not exist"),
        (["--resume", "--seeds", "3", "--steps", "9"], "leave --seeds, --steps out"),
        (["--eval-k", "9"], "--eval-k 9 needs at least as many completions"),
    ],
)
def test_bad_input_is_refused_with_a_sentence_and_leaves_nothing(
    setup: Path, refused: Says, arguments: list[str], words: str
) -> None:
    assert words in refused("sweep", setup, *arguments)
    assert not list(Path().glob("outputs/*/sweep.json"))


def test_without_a_setup_file_the_dataset_has_one(setup: Path, refused: Says) -> None:
    assert "a setup file, or --dataset" in refused("sweep")
    assert "Setup file not found: src/app/trainer_setup_dataset.py" in refused("sweep", "--dataset", "gsm8k")


def test_two_sweeps_have_nothing_in_common(setup: Path) -> None:
    one = Sweep(setup=str(setup), seeds=(1, 2), name="mine")
    others = [
        Sweep(setup=str(setup), seeds=(1, 2), name="mine", start_instance=2),
        Sweep(setup=str(setup), seeds=(1, 2), name="mine", base_port=9000, run_prefix="b"),
        Sweep(setup=str(setup), seeds=(1, 2), name="mine", base_port=9000, output_base="b"),
    ]
    for other in others:
        assert one.folder != other.folder
        for attribute in ("output", "run_dir", "caches"):
            assert not {getattr(run, attribute) for run in one.runs} & {getattr(run, attribute) for run in other.runs}
        logs = [{run.training_log(preflight.core_places(1, [0])[0]) for run in each.runs} for each in (one, other)]
        assert not logs[0] & logs[1]
        ports = [{port for run in each.runs for port in run.port_pairs()[0]} for each in (one, other)]
        assert len(ports[0]) == len(ports[1]) == 4 and not ports[0] & ports[1]


def test_the_ports_are_those_of_the_original(setup: Path) -> None:
    sweep = Sweep(setup=str(setup), seeds=(1, 2, 3, 4), name="mine")
    assert [run.port_pairs()[0] for run in sweep.runs] == [(8000, 51200), (8001, 51300), (8002, 51400), (8003, 51500)]
    every = [pair for run in sweep.runs for pair in run.port_pairs()]
    assert len(every) == len(set(every))


def test_a_sweep_is_found_from_anywhere_by_its_folder_or_by_the_one_above(
    setup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = TrainingSettings(set={"beta": "0.1"}, steps=3, eval_k=(1, 2))
    sweep = Sweep(setup=str(setup), seeds=(1, 2), name="mine", training=training, given=("steps", "eval_k"))
    sweep.folder.mkdir(parents=True)
    plan.write(sweep)
    found = plan.load(plan.find(Path("outputs")))
    assert found == plan.load(sweep.folder)
    output = found.runs[0].output
    assert (output, found.log_folder) == (sweep.runs[0].output, sweep.log_folder.absolute())
    assert (found.training, found.given, found.seeds) == (sweep.training, sweep.given, sweep.seeds)
    monkeypatch.chdir("/")
    assert plan.load(setup.parent / "outputs" / "sweep_mine").runs[0].output == output
    monkeypatch.chdir(setup.parent)
    other = Sweep(setup=str(setup), seeds=(1,), name="other")
    other.folder.mkdir()
    plan.write(other)
    with pytest.raises(plan.RunDirError, match="2 sweeps"):
        plan.find(Path("outputs"))


def small(**changes: object) -> TrainerFacts:
    """A trainer of 1000 numbers, which saves four checkpoints."""
    parameters = Parameters(count=1000, trained=1000, nbytes=4000, trained_bytes=4000, dtypes={})
    return facts(**{"parameters": parameters, "save_steps": 25, **changes})


def test_the_disk_that_the_checkpoints_need_is_looked_at_first(setup: Path) -> None:
    each = 4000 + 8000
    assert preflight.needed_bytes(small()) - preflight.LOGS_BYTES == 4 * each
    assert preflight.needed_bytes(small(save_total_limit=1)) - preflight.LOGS_BYTES == 2 * each
    assert preflight.needed_bytes(small(save_strategy="no")) == preflight.LOGS_BYTES
    huge = Parameters(count=10**15, trained=10**15, nbytes=2 * 10**15, trained_bytes=2 * 10**15, dtypes={})
    sweep = Sweep(setup=str(setup), seeds=(1, 2), name="mine")
    with pytest.raises(UsageError, match=r"2 runs need about .* GB in .*save_total_limit"):
        preflight._check_disk(sweep, small(parameters=huge))


def test_the_disk_that_kept_versions_need_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.kept_bytes(small(), TrainingSettings()) == 0
    assert preflight.kept_bytes(small(), TrainingSettings(delta_every=1)) == pytest.approx(4000 * (2 + 0.7 * 99), abs=1)
    bf16 = TrainingSettings(delta_every=10, publish_dtype="bf16")
    assert preflight.kept_bytes(small(), bf16) == pytest.approx(2000 * (1 + 0.2 * 10), abs=1)
    monkeypatch.setattr(preflight, "FULL_EVERY", 5)
    few = TrainingSettings(delta_every=1, delta_keep=5)
    assert preflight.kept_bytes(small(), few) == pytest.approx(4000 * (3 + 0.7 * 12), abs=1)


def test_a_generator_of_the_command_line_is_what_the_setup_file_is_judged_by(
    setup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Question] = []
    monkeypatch.setattr(preflight, "look_at_trainer", lambda question: asked.append(question) or Look(facts=small()))
    sweep = Sweep(setup=str(setup), seeds=(1, 2), name="mine", work=WorkerSettings(generator="vllm-server"))
    preflight._facts(sweep, preflight.core_places(1, [0])[0])
    assert [question.plan.work.generator for question in asked] == ["vllm-server"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")


def trl_places(found: TrainerFacts, **options: Any) -> list[tuple[str, ...]]:
    """The GPUs of each place of a sweep with plain TRL."""
    sweep = Sweep(setup="s.py", seeds=(1, 2, 3), name="mine", mode="trl", **options)
    return [place.gpus for place in preflight._places_of_plain_trl(sweep, found, preflight.places_of(sweep))]


SERVED = {"use_vllm": True, "vllm_server": True}


@pytest.mark.usefixtures("gpus")
def test_plain_trl_has_one_gpu_a_run_and_with_a_server_two() -> None:
    assert trl_places(small()) == [("0",), ("1",), ("2",)]
    assert trl_places(small(**SERVED)) == [("0", "1"), ("2", "3")]
    assert trl_places(small(**SERVED), gpus_per_run=3) == [("0", "1", "2")]
    with pytest.raises(UsageError, match=r"--gpus-per-run 2: plain TRL \(--mode trl\) trains each run in one"):
        trl_places(small(), gpus_per_run=2)
    with pytest.raises(UsageError, match="wants a GPU for the trainer and others for the server: --gpus-per-run 2"):
        trl_places(small(**SERVED), gpus_per_run=1)


def test_plain_trl_with_a_server_needs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda: 0)
    with pytest.raises(UsageError, match="TRL sends it weights with NCCL"):
        trl_places(small(**SERVED))


@pytest.mark.usefixtures("gpus")
def test_plain_trl_starts_its_server_on_the_other_gpus_and_ports_of_its_own(setup: Path) -> None:
    run = Sweep(setup=str(setup), seeds=(1, 2), name="mine", mode="trl").runs[1]
    place = preflight.Place(name="gpu2-3", gpus=("2", "3"))
    found = Preflight(places=[place], offline=False, serves=True)
    started = command(run, place, found, print)
    arguments = " ".join(started.arguments)
    port, group_port = (int(arguments.split(f"{name}=")[1].split()[0]) for name in ("server_port", "group_port"))
    assert "--device 0 --generator vllm-server --server-devices 6" in arguments
    assert (port, group_port) in run.port_pairs()
    assert started.env["CUDA_VISIBLE_DEVICES"] == "5,6"
    link = run.sweep.log_folder / "vllm_instance1_gpu3_seed2.log"
    assert link.readlink() == run.run_dir / "log_vllm_server.txt"
    alone = command(run, place, replace(found, serves=False), print)
    assert not {"--generator", "--server-devices"} & set(alone.arguments)


@pytest.mark.parametrize(
    ("mode", "found"), [("async", {"generator": "named-server"}), ("trl", {**SERVED, "names_server": True})]
)
def test_one_vllm_server_is_not_shared_by_several_runs(setup: Path, mode: str, found: dict[str, object]) -> None:
    several = Sweep(setup=str(setup), seeds=(1, 2), name="mine", mode=mode)
    with pytest.raises(UsageError, match="2 runs cannot share it"):
        preflight._refuse_shared_server(several, small(**found))
    preflight._refuse_shared_server(several, small(use_vllm=True))
    preflight._refuse_shared_server(Sweep(setup=str(setup), seeds=(1,), name="mine", mode=mode), small(**found))


def test_wandb_without_a_key_is_offline(tmp_path: Path) -> None:
    assert wandb_is_offline({}, tmp_path)
    assert not wandb_is_offline({"WANDB_API_KEY": "k"}, tmp_path)
    assert not wandb_is_offline({"WANDB_MODE": "disabled"}, tmp_path)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n")
    assert not wandb_is_offline({}, tmp_path)
