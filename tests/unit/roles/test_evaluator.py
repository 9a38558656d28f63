"""The weights that `async-grpo evaluate` publishes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from async_grpo.errors import UsageError
from async_grpo.evals.estimators import Answers
from async_grpo.evals.eval_ledger import Evaluated, evaluated, read
from async_grpo.roles import answering, evaluator
from async_grpo.roles.answering import load_weights
from async_grpo.rundir.paths import RunDir
from async_grpo.settings import EVAL_SAMPLING
from async_grpo_ipc import open_remote_memory
from kit.plans import planned


def test_of_two_models_the_frozen_weights_are_each_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(requires_grad=False)

    def load(trainer: Any, source: str) -> None:
        for parameter in trainer.model.parameters():
            nn.init.constant_(parameter, float(source))

    monkeypatch.setattr(answering, "load_weights", load)
    run = RunDir(tmp_path)
    with answering.PublishedModels(SimpleNamespace(model=model), run, "host") as weights:  # type: ignore[arg-type]
        for version in range(2):
            weights.publish(version, str(version))
            with open_remote_memory(run.weights_handle) as worker, worker.lease() as seen:
                assert [seen[name].flatten()[0].item() for name in ("weight", "bias")] == [version] * 2


OF_HEAD = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "eta": 0.2}


def samplings(*, guided: bool = True, etas: tuple[Any, ...] = (), **training: Any) -> list[dict[str, Any]]:
    trainer: Any = SimpleNamespace(**({"guidance": SimpleNamespace(sampling=OF_HEAD)} if guided else {}))
    return evaluator._samplings(trainer, replace(planned(Path("setup.py"), **training), etas=etas))


def test_a_guided_evaluation_samples_as_the_head_says_where_the_command_says_nothing() -> None:
    assert samplings(guided=False) == [{"temperature": 0.6, "top_p": 0.95, "top_k": 20}]
    assert samplings() == [OF_HEAD]
    assert samplings(eval_temperature=0.0) == [{**OF_HEAD, "temperature": 0.0}]
    assert samplings(etas=(0.5, "off")) == [{**OF_HEAD, "eta": 0.5}, {**OF_HEAD, "eta": "off"}]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"guided": False, "etas": (0.1,)}, r"--eval-eta: the trainer of \S*setup.py is not guided"),
        ({"eval_top_p": 0.9}, "values are of the untruncated sampler: set top_p to 1"),
        ({"eval_top_k": 20}, "values are of the untruncated sampler"),
        ({"eval_temperature": 1.0}, "--eval-temperature 1.0: the head has values of the sampler at temperature 0.7"),
    ],
)
def test_what_a_guided_evaluation_cannot_do_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        samplings(**asked)


def test_a_file_without_problems_is_told_what_to_add() -> None:
    """As the file of `async-grpo init` is."""
    server: Any = SimpleNamespace(run=None, plan=planned(Path("mine.py")), trainer=SimpleNamespace(eval_dataset=None))
    with pytest.raises(UsageError, match=r"mine\.py has no eval_dataset\. Add eval_dataset=Dataset\.from_list"):
        evaluator._beginning(server)


class Tied(nn.Module):
    """As transformers has it: the input's and the output's embedding may be one."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    @classmethod
    def from_pretrained(cls, source: str, **_: Any) -> tuple[Tied, dict[str, list[str]]]:
        return cls(tied=source == "tied"), {"missing_keys": [], "mismatched_keys": []}


def test_a_checkpoint_with_weights_of_its_own_for_tied_ones_is_refused() -> None:
    trainer: Any = SimpleNamespace(model=Tied(tied=True))
    load_weights(trainer, "tied")
    with pytest.raises(UsageError, match=r"embed\.weight and head\.weight are tied in the setup file's model"):
        load_weights(trainer, "untied")
    untied: Any = SimpleNamespace(model=Tied(tied=False))
    load_weights(untied, "tied")
    assert torch.equal(untied.model.head.weight, untied.model.embed.weight)


class Answered:
    """An evaluation that is over at once."""

    total = 1

    def __init__(self, version: int, replicates: int, problem: int) -> None:
        self.version, self._replicates = version, replicates
        self.answers = {problem: Answers(rewards=[1.0], successes=[True])}

    def wait(self, should_stop: Any) -> bool:
        return True

    def look(self) -> Evaluated:
        about = {"seconds": 1.0, "replicates": self._replicates, "sampling": {}, "first_seq": -1}
        return evaluated(self.answers, {}, ks=(1,), run_id="run-1", step=self.version, **about)


def test_a_resumed_evaluation_tells_what_it_found_now_and_needs_no_common_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `--eval-replicates` is another one now, or a problem that had failed has its answers."""

    def evaluate(replicates: int) -> None:
        begin = lambda version, sampling: Answered(version, replicates, problem=version)  # noqa: E731
        monkeypatch.setattr(evaluator, "_beginning", lambda server: begin)
        weights = SimpleNamespace(publish=lambda version, model: None)
        of_run = {"run": run, "plan": planned(tmp_path, models=("a", "b")), "state": SimpleNamespace(run_id="run-1")}
        server = SimpleNamespace(**of_run, trainer=object(), weights=weights, should_stop=lambda: False)
        assert evaluator.evaluate_all(server)

    run = RunDir(tmp_path / "evaluation")
    run.root.mkdir()
    evaluate(1)
    evaluate(2)
    assert [(one.step, one.replicates) for one in read(run.evaluations)] == [(0, 2), (1, 2)]
    assert json.loads(run.comparison.read_text()) == {"differences": [{"sampling": EVAL_SAMPLING, "figures": {}}]}


def test_an_adapter_that_is_scaled_otherwise_is_refused(tmp_path: Path) -> None:
    """Its weights have the same names and shapes, so they would be taken and give other figures."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 32}')
    model = SimpleNamespace(peft_config={"default": SimpleNamespace(r=8, lora_alpha=16)})
    with pytest.raises(UsageError, match="another adapter than the setup file's: lora_alpha is 32 there and 16 here"):
        load_weights(SimpleNamespace(model=model), str(tmp_path))  # type: ignore[arg-type]
