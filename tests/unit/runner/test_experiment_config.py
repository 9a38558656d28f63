"""Keys of an experiment: what is refused, with which words; and what Hydra composes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from experiment_yard import tree

from async_grpo.cli import main
from async_grpo.errors import BadFileError, UsageError
from async_grpo.rundir.locks import KernelLock
from async_grpo_experiments.runner import experiment
from async_grpo_experiments.runner.config import checked
from async_grpo_experiments.runner.config_files import changed, composed, folder_of_conf, write_config
from async_grpo_experiments.runner.graph import chains_left, estimate_job_priority, graph_of, keys_of, kind_of, named
from async_grpo_experiments.runner.peaks import BatchMemory, MemoryPeaks, StageForecast, StageSeconds
from async_grpo_experiments.runner.run import MEMORY, SECONDS
from async_grpo_experiments.slots.ledger import LEDGER, RUNNING, Ledger, Record
from kit.commands import Says

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"experiment": {"name": None}}, "experiment.name must be set"),
        ({"experiment": {"name": "a/b"}}, "'a/b' is the name of a folder"),
        ({"training": {"datasets": ["sums"], "microbatch_size": 3}}, "the nearest is 'micro_batch_size'"),
        ({"training": {"datasets": ["sums"], "micro_batch_size": "abc"}}, 'micro_batch_size is "abc", not an integer'),
        ({"training": {"datasets": []}}, "The matrix has 0 jobs"),
        ({"training": {"datasets": ["sum"]}}, "datasets has no 'sum'. The nearest is sums"),
        ({"algos": {"PITTA": {}}}, "algos has no 'PITTA'. The nearest is PITA"),
        ({"algos": {"PITA": {"enabled": False}}}, "The matrix has 0 jobs"),
        ({"algos": {"PITA": {"batch_size": 10}}}, "must be a multiple of .* 4: set it to 8 or 12"),
        ({"rounds_of_training": 0}, "rounds_of_training must be at least 1"),
        ({"evaluation": {"etas": [0.0]}}, "evaluation.etas must be over 0"),
        ({"system": {"attn_impl": "flash_attention_2"}}, "set system.attn_impl=eager"),
        ({"system": {"max_parallel_jobs": 0}}, "max_parallel_jobs must be at least 1"),
        ({"scheduling": {"deadline_s": 0.0}}, "deadline_s must be over 0"),
        ({"scheduling": {"silence_s": -1.0}}, "silence_s must be over 0"),
        ({"scheduling": {"stagger_s": -1.0}}, "stagger_s must be 0 or more"),
        ({"system": {"gpus_per_job": 0}}, "gpus_per_job must be at least 1"),
        (
            {"system": {"gpus_per_job": 2}, "algos": {"PITA": {"batch_size": 20}}},
            "must be a multiple of training.micro_batch_size times 2 GPUs, 8: set it to 16 or 24",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        checked(tree(**keys))


def begun(root: Path) -> Path:
    """The folder of an experiment that has been started."""
    config = checked(tree())
    root.mkdir()
    write_config(root, config, graph_of(config))
    return root


def test_a_resume_reads_values_as_hydra_does(tmp_path: Path) -> None:
    root = begun(tmp_path / "x")
    config = changed(root, ["algos.DPO.lr=2e-5", "evaluation.etas=[1,2.5]", "experiment.name=other", "num_samples=2"])
    assert config.algos["DPO"] == {"lr": 2e-5}
    assert (config.evaluation.etas, config.experiment.name, config.num_samples) == ([1, 2.5], "other", 2)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+num_samples=2", "An item is already at 'num_samples'"),
        ("evaluation.etas=" + "[" * 3000 + "]" * 3000, "recursion depth"),
        ("evaluation.etas=2026-99-99", 'evaluation.etas is "2026-99-99", not a list'),
        ("+num_sample=1", "the nearest is 'num_samples'"),
    ],
)
def test_what_a_resume_cannot_change_is_refused(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        changed(begun(tmp_path / "x"), [override])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"5", "it is 5, not an object"),
        (b"a: [", "it is not valid YAML"),
        (b"!!python/object/apply:os.system ['x']", "it is not valid YAML"),
        (b"experiment: 2026-99-99", "it is not valid YAML"),
        (b"? [1]\n: 2", "it is not valid YAML"),
        (b"[" * 3000 + b"]" * 3000, "nested too deeply"),
        (b"algos: {PITA: {x: " + b"[" * 250 + b"]" * 250 + b"}}", "nested too deeply"),
        (b"algos: &a {PITA: {x: *a}}", "it has an alias"),
        (b"1: 2", "it has an unknown field '1'"),
        (b"experiment: {name: }", "experiment.name must be set"),
    ],
)
def test_a_folder_whose_configuration_is_none_is_refused_by_name(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises((UsageError, BadFileError), match=rf"config\.yaml.*{said}"):
        changed(tmp_path, [])


@pytest.mark.parametrize("text", ["[", '{"GRPO": Infinity}', '{"GRPO": [1]}'])
def test_measures_that_cannot_be_read_are_none(tmp_path: Path, text: str) -> None:
    for name in (MEMORY, SECONDS):
        (tmp_path / name).write_text(text)
    assert "GRPO" not in MemoryPeaks(tmp_path / MEMORY)
    assert StageSeconds(tmp_path / SECONDS).by_kind == {}


def test_repetitions_have_seeds_of_their_own() -> None:
    graph = graph_of(checked(tree(num_samples=2)))
    seeds = {stage.job.id: stage.job.seed for stage in graph.values() if stage.job.algo == "DPO"}
    assert seeds["DPO_tiny_sums_r1_s0"] == seeds["DPO_tiny_sums_r2_s0"] == 42
    assert seeds["DPO_tiny_sums_r1_s1"] == 43
    assert graph["DPO_tiny_sums_r2_s1.train"].needs == (
        "DPO_tiny_sums_r1_s1.train",
        "DPO_tiny_sums_r1_s1.generate",
        "DPO_tiny_sums_r2_s1.generate",
    )


def test_a_key_is_of_the_stages_that_it_changes() -> None:
    before, after = checked(tree()), checked(tree(algos={"QSharp": {"lr": 1.0}, "DPO": {"lr": 1e-5}}))
    changed = [name for name, stage in graph_of(before).items() if keys_of(before, stage) != keys_of(after, stage)]
    assert changed == ["QSharp_tiny_sums_r1.train", "QSharp_tiny_sums_r2.train"]


def test_the_longest_chain_is_first_and_a_function_may_say_otherwise() -> None:
    graph = graph_of(checked(tree()))
    first, last = "DPO_tiny_sums_r1.generate", "DPO_tiny_sums_r1.evaluate"
    left = chains_left(graph, {})
    assert (left[first], left[last]) == (5, 1)
    seconds = {("DPO", "generate"): 10.0, ("DPO", "train"): 100.0, ("DPO", "evaluate"): 1.0}
    assert chains_left(graph, seconds)[first] == 221
    assert named("async_grpo_experiments.runner.graph:estimate_job_priority") is estimate_job_priority
    with pytest.raises(UsageError, match=r"package\.module:function"):
        named("async_grpo_experiments:nothing")


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, refused: Says) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "the runner starts the processes" in refused("experiment", "experiment.name=x")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--status", "x", "experiment.name=y"], "take no keys"),
        (["--status", "x", "--dry-run"], "not allowed with argument --status"),
        (["--retry", "JOB", "x", "num_samples=2"], "name the folder of the experiment, and nothing else"),
        (["resume_from=x", "resume_from=y"], "give resume_from=DIR once"),
        (["resume_from=x", "--outputs", "y"], "Leave it out"),
        (["resume_from=x"], "x holds no experiment"),
    ],
)
def test_what_would_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str, refused: Says
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused("experiment", *arguments)


@pytest.mark.parametrize("is_run", [True, False])
def test_a_status_says_what_runs_only_while_a_runner_lives(tmp_path: Path, printed: Says, is_run: bool) -> None:
    root = begun(tmp_path / "x")
    ledger = Ledger(root / LEDGER)
    ledger.put(Record(task="DPO_tiny_sums_r1.train", state=RUNNING))
    ledger.close()
    with KernelLock(root / experiment.LOCK) as lock:
        assert not is_run or lock.try_acquire()
        said = printed("experiment", "--status", root)
    (row,) = [line for line in said.splitlines() if "DPO_tiny_sums_r1" in line]
    assert ("train" in row) is is_run


class TestWithHydra:
    """What Hydra composes."""

    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(experiment, "ask_forecast", lambda config: {})

    def test_a_dry_run_shows_jobs_and_graph(self, printed: Says) -> None:
        said = printed("experiment", "experiment.name=x", "gpu=a100_40gb", "--dry-run")
        assert "9 jobs, 25 stages" in said
        assert "PITA_llama_GSM8K_r2.generate needs PITA_llama_GSM8K_r1.train" in said
        assert "25 stages of kinds that have not run in outputs yet" in said

    def test_a_stage_that_no_gpu_has_room_for_is_shown_with_the_batch_that_fits(
        self, printed: Says, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = ["experiment.name=x", "algos.DPO.enabled=false", "algos.GRPO.enabled=false", "rounds_of_training=1"]
        config = checked(composed(folder_of_conf(), keys))
        kinds = {kind_of(stage, config): stage for stage in graph_of(config).values()}
        halves = [BatchMemory(rows, rows * 10**10) for rows in (8, 4, 2, 1)]
        answers = {kind: StageForecast(memory=halves, disk=0) for kind in kinds}
        monkeypatch.setattr(experiment, "ask_forecast", lambda config: answers)
        monkeypatch.setattr(experiment, "largest_memory", lambda config: 68 * 10**9)
        train = next(stage for stage in kinds.values() if (stage.job.algo, stage.kind) == ("PITA", "train"))
        MemoryPeaks(Path(MEMORY)).peak_of(train, Path("nowhere"), config, 200 * 10**9)
        said = printed("experiment", *keys, "--outputs", ".", "--dry-run")
        needs = "needs {}, and the largest place has 68.0 GB: set {}, which needs {}.\n"
        assert needs.format("88.0 GB", "generation.batch_size=4", "44.0 GB") in said
        assert "PITA train, llama " + needs.format("220.0 GB", "training.micro_batch_size=2", "55.0 GB") in said

    def test_the_time_of_a_kind_is_that_of_its_last_stage(self, printed: Says) -> None:
        keys = ["algos.PITA.enabled=false", "algos.DPO.enabled=false", "algos.GRPO.enabled=false"]
        config = checked(composed(folder_of_conf(), ["experiment.name=x", *keys]))
        for stage in graph_of(config).values():
            StageSeconds(Path(SECONDS)).note({kind_of(stage, config): 3600.0})
        assert "all stages: unknown on disk, 7 h 0 min one after another\n" in printed(
            "experiment", "experiment.name=x", *keys, "--outputs", ".", "--dry-run"
        )

    def test_the_script_of_the_original_is_the_same_command(self) -> None:
        """It refuses what the command refuses, before a child with torch is asked anything."""
        script = str(ROOT / "scripts" / "run_parallel.py")
        command = [sys.executable, script, "experiment.name=x", "training.foo=1", "--dry-run"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 2 and "foo" in ran.stderr

    @pytest.mark.slow
    def test_the_check_of_the_machine_passes(self) -> None:
        command = [sys.executable, str(ROOT / "scripts" / "test_parallel_setup.py")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "Imports OK" in ran.stdout and "Serialization OK" in ran.stdout

    @pytest.mark.parametrize(
        ("keys", "said"),
        [
            (["gpu=cpu"], "experiment.name must be set"),
            (["experiment.name=x", "training.foo=1"], "foo"),
            (["experiment.name=x", "+training.microbatch=1"], "the nearest is 'micro_batch_size'"),
            (["experiment.name=x", "gpu=h100"], "h100"),
        ],
    )
    def test_keys_that_there_are_not_are_refused(self, keys: list[str], said: str, refused: Says) -> None:
        assert said in refused("experiment", *keys, "--dry-run")

    def test_an_own_configuration_takes_the_place_of_the_packages(self, refused: Says) -> None:
        assert main(["experiment", "--init"]) == 0
        path = Path("conf/config.yaml")
        path.write_text(path.read_text().replace("name: null", "name: mine"))
        assert main(["experiment", "--dry-run"]) == 0
        assert "conf exists" in refused("experiment", "--init")
