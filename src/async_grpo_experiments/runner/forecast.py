"""What each kind of stage needs, before it runs: from models that are built without their weights, on torch's `meta`.

Memory goes by the rules of `checks.plan.memory`. `stages forecast` answers it, in a process with torch; what earlier
stages of the kind have had and taken is in `peaks`, and goes before.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from async_grpo.checks.plan.memory import kv_bytes_a_token, pass_bytes, trained_bytes
from async_grpo.checks.plan.trainer_facts import parameters_of, shape_of
from async_grpo.errors import UsageError
from async_grpo.formatting import one_line
from async_grpo_experiments.reward_models import prompt_ids
from async_grpo_experiments.runner.config import GUIDED, ExperimentConfig
from async_grpo_experiments.runner.graph import Stage, graph_of, kind_of
from async_grpo_experiments.runner.peaks import BatchMemory, StageForecast, smaller_batches
from async_grpo_experiments.runner.stage_settings import problems_of, settings_of

PROMPTS_MEASURED = 64
_OPTIMIZER = "adamw_torch"
_SAMPLING = 3  # the server's model, and the two versions that it publishes; workers map those
_LOGITS = 4  # copies in fp32 where a loss takes logits


def forecast(config: ExperimentConfig) -> dict[str, StageForecast]:
    """By kind of stage. `UsageError`: a model cannot be read."""
    found: dict[str, StageForecast] = {}
    families = {name: _Family(config, name) for name in config.families}
    for stage in graph_of(config).values():
        if (kind := kind_of(stage, config)) not in found:
            found[kind] = families[stage.job.family].forecast(stage)
    return found


class _Family:
    """The models of a family, and the longest text that they meet."""

    def __init__(self, config: ExperimentConfig, name: str) -> None:
        self._config, self._name, self._keys = config, name, config.models[name]

    def forecast(self, stage: Stage) -> StageForecast:
        algo, config = stage.job.algo, self._config
        if stage.kind == "train":
            by_batch = [BatchMemory(rows, self._training(algo, rows)) for rows in smaller_batches(stage, config)]
            return StageForecast(memory=by_batch, disk=2 * self._left(algo))
        guided = algo in GUIDED and (stage.kind == "evaluate" or stage.job.round > 1)
        beside = self._judge if stage.kind == "evaluate" else 0
        later = self._judge if stage.kind == "generate" else self._comparison(algo)  # when the workers have ended
        by_batch = [
            BatchMemory(rows, max(beside + self._sampling(guided, rows), later))
            for rows in smaller_batches(stage, config)
        ]
        samples = 0 if stage.kind == "evaluate" else 2 * 4 * self._sampled(algo) * self._tokens  # and rows of them
        return StageForecast(memory=by_batch, disk=samples)

    def _sampling(self, guided: bool, rows: int) -> int:
        shape = shape_of(self._reference)
        cache = 0 if shape is None else rows * self._tokens * kv_bytes_a_token(shape)
        return _SAMPLING * _weights(self._reference) + cache + (_weights(self._value) if guided else 0)

    def _comparison(self, algo: str) -> int:
        """Two policies and the logits of one problem's completions, where the trained one is compared."""
        shape = shape_of(self._trained)
        if not algo or algo in GUIDED or shape is None:
            return 0
        rows = self._config.evaluation.num_samples
        return 2 * _weights(self._trained) + _LOGITS * 4 * rows * self._tokens * shape.vocabulary

    def _training(self, algo: str, rows: int) -> int:
        """A head alone; or a policy, and the reference beside it."""
        config, is_head = self._config, algo in GUIDED
        model = self._value if is_head else self._trained
        shape = shape_of(model)
        held = trained_bytes(parameters_of(model), _OPTIMIZER)
        held += 0 if is_head else _weights(model) * (3 if algo.startswith("GRPO") else 1)  # it publishes two versions
        held += self._judge if algo == "GRPO" else 0
        if shape is None:
            return held
        logits = 0 if is_head else _LOGITS * 4 * rows * config.generation.max_new_tokens * shape.vocabulary
        checkpointed = config.training.gradient_checkpointing
        return held + pass_bytes(shape, rows * self._tokens, logits, half=False, checkpointed=checkpointed)

    def _left(self, algo: str) -> int:
        """Bytes of what a training leaves; with checkpoints, and their optimizer's state, once more."""
        weights = _weights(self._value if algo in GUIDED else self._trained)
        return weights * (3 if self._config.training.save_steps else 1)

    def _sampled(self, algo: str) -> int:
        """Completions of a round: a roll-in, and as many continuations as are asked for, of pairs two each."""
        settings = settings_of(self._config, algo, self._name, seed=0)
        each = getattr(settings, "samples_per_example", getattr(settings, "samples_per_prompt", 1))
        return self._problems * (1 + 2 * int(each))

    @cached_property
    def _judge(self) -> int:
        """The largest reward model of the datasets, in float32; 0: there is none."""
        names = {keys.reward_model for keys in self._config.datasets.values() if keys.reward_model is not None}
        return max(
            (_weights(_built(name, torch.float32, AutoModelForSequenceClassification)) for name in names), default=0
        )

    @cached_property
    def _reference(self) -> Any:
        return _built(self._keys.ref, None)

    @cached_property
    def _trained(self) -> Any:
        """The reference as it is trained: in float32."""
        return _built(self._keys.ref, torch.float32)

    @cached_property
    def _value(self) -> Any:
        return _built(self._keys.value or self._keys.ref, torch.float32).base_model

    @cached_property
    def _sets(self) -> list[Any]:
        return [problems_of(self._config, dataset) for dataset in self._config.training.datasets]

    @cached_property
    def _problems(self) -> int:
        return max(len(problems.rows) for problems in self._sets)

    @cached_property
    def _tokens(self) -> int:
        """The tokens of the longest measured prompt with the longest completion."""
        tokenizer = AutoTokenizer.from_pretrained(self._keys.ref)
        return max(_lengths(self._sets, tokenizer)) + self._config.generation.max_new_tokens


def _lengths(sets: list[Any], tokenizer: Any) -> Iterator[int]:
    for problems in sets:
        for row in islice(problems.rows, PROMPTS_MEASURED):
            yield len(prompt_ids(tokenizer, row["prompt"]))


def _built(name: str, dtype: torch.dtype | None, kind: Any = AutoModelForCausalLM) -> Any:
    """The model, without weights; None: in the type of its configuration, as it is loaded to sample."""
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {one_line(str(error))}") from error
    with torch.device("meta"):
        return kind.from_config(config, dtype=dtype or config.dtype or torch.float32)


def _weights(model: Any) -> int:
    found = parameters_of(model)
    return found.nbytes + found.buffer_bytes
