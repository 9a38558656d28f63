"""What the user's code changes of the sampling while a run is under way: a callback, or an override of a method.

An engine has its settings from the trainer as the setup file built it. A change is seen when the next tokens are asked
for, and sent with the job, or refused.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from async_grpo.errors import RunRefused
from async_grpo.setup.generator_choice import HF, Capabilities

if TYPE_CHECKING:
    from transformers import GenerationConfig

_OF_JOBS = {"max_new_tokens": "max_tokens", **{name: name for name in ("temperature", "top_p", "top_k", "min_p")}}
"""By the name in `GenerationConfig`, what a job calls it."""
_OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_DRAWS_NOTHING = (  # how the names begin of what no token depends on
    *("_", "output_", "use_cache", "cache_", "max_cache", "pad_token", "bos_token", "disable_compile"),
    *("compile_", "return_dict", "prefill_chunk", "transformers_version", "continuous_batching"),
)


class SamplingChanges:
    """Compares what a trainer samples with to what it sampled with when this object was made.

    Args:
        engine: what samples; None where that is not known.
        max_staleness: None where that is not known.
    """

    def __init__(self, trainer: Any, *, engine: Capabilities | None = HF, max_staleness: int | None = 0) -> None:
        self._before = copy.deepcopy(_settings(trainer))
        self._config = copy.deepcopy(getattr(trainer, "generation_config", None))
        self.engine, self.max_staleness = engine, max_staleness

    def of(self, trainer: Any, decided: Collection[str] = ()) -> dict[str, Any]:
        """The settings that differ by now, as a job has them, but for those that it has decided.

        Raises:
            RunRefused: one of them that workers cannot sample with.
        """
        now, before = _settings(trainer), self._before
        changed = {name for name in now if now[name] != before.get(name) and not name.startswith(_DRAWS_NOTHING)}
        brought = {}
        for name in sorted(it for it in changed if _OF_JOBS.get(it) not in decided):
            value = _OFF.get(name) if now[name] is None else now[name]
            self._check(name, value, f"{name} of generation_config has changed from {before.get(name)!r} to {value!r}")
            brought[_OF_JOBS[name]] = value
        return brought

    def config_of(self, sampling: Mapping[str, Any]) -> GenerationConfig | None:
        """The trainer's `generation_config` as a job with these settings has it, None where TRL makes none."""
        config = copy.deepcopy(self._config)
        for name, of_job in _OF_JOBS.items():
            if config is not None and of_job in sampling:
                setattr(config, name, sampling[of_job])
        return config

    def _check(self, name: str, value: Any, change: str) -> None:
        if name not in _OF_JOBS or value is None:
            raise RunRefused(
                f"{change} during the run. Jobs bring {', '.join(_OF_JOBS)} to workers, and nothing else of it. Set "
                "it in the GRPOConfig's generation_kwargs, or train in one process (without --distributed)."
            )
        if name != "max_new_tokens" and not (self.engine and self.engine.full_softmax):
            raise RunRefused(
                f"{change} during the run: vLLM's log-probabilities are then of another distribution than the loss "
                "computes. Take --generator hf (with workers of the launcher), whose log-probabilities are of the full "
                "softmax, or leave it as it is."
            )
        if name == "temperature" and self.max_staleness != 0:
            raise RunRefused(
                f"{change} during the run: groups of several temperatures would be trained on as if they were of one. "
                "Take --max-staleness 0, where each batch has that of its step, or set one in the GRPOConfig."
            )


def _settings(trainer: Any) -> dict[str, Any]:
    """As `setup.sampling.transformers_config` has them, without a copy: they are looked at for each job.

    Nothing where an engine inside the model samples: TRL makes no `generation_config` then.
    """
    config = getattr(trainer, "generation_config", None)
    if config is None:
        return {}
    given = {name: value for name, value in vars(config).items() if value is not None}
    settings = vars(config) | vars(trainer.model.generation_config) | given
    top_k = settings.get("top_k")
    return settings | {"top_k": top_k if top_k is None else max(top_k, 0)}
