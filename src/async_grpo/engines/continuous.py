"""Sampling with continuous batching: groups join and leave between two steps of an engine such as vLLM's.

New weights, with `in_flight_update` off: no group starts until those in flight have ended, and then the weights are
adopted (a LoRA adapter needs no such pause: old and new are kept side by side). With `on` they are adopted between two
steps, the running requests continue with them, and every token is labelled with the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from async_grpo.engines import Chunk, PreparedGroup, SampledGroup, WeightsLostError
from async_grpo.engines.policy import Policy
from async_grpo.errors import GeneratorError, PeerDiedError
from async_grpo.setup.generator_choice import VLLM
from async_grpo.telemetry.activity import ADOPTING, activity
from async_grpo.tokens import Tokens
from async_grpo_ipc import ExporterDiedError

if TYPE_CHECKING:
    from async_grpo.engines.vllm import VLLMEngine
    from async_grpo_ipc import RemoteWeights


class ContinuousEngine(Policy):
    """Samples groups as requests of `engine`, which has memory of its own for the weights.

    Args:
        deterministic: each completion is seeded by its job.
    """

    capabilities = VLLM

    def __init__(
        self, engine: VLLMEngine, *, group_size: int, in_flight_update: bool = False, deterministic: bool = False
    ) -> None:
        self.most_groups = max(1, engine.max_num_seqs // group_size)
        self._engine = engine
        self._in_flight_update = in_flight_update
        self._deterministic = deterministic
        self._requests: dict[str, tuple[_SampledRequests, int]] = {}  # request -> its group and its index there
        self._request_ids = map(str, count())
        self._adopted: tuple[str, int] | None = None  # generation and version of the engine's weights
        self._version = -1

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        ended = [failed for group in new if (failed := self._submit(group)) is not None]
        if self._engine.busy:
            activity.progress()
        for chunk in self._engine.step() if self._engine.busy else ():
            group, index = self._requests[chunk.request_id]
            group.add(index, chunk, self._version)
            if chunk.finished:
                del self._requests[chunk.request_id]
                if not group.open:
                    ended.append(group.sampled)
        return ended

    def close(self) -> None:
        self._engine.abort(list(self._requests))
        self._requests.clear()

    def end(self) -> None:
        """Nothing was started outside of this process."""

    def follow(self, weights: RemoteWeights) -> ContinuousEngine:
        """The engine is its own `Policy`."""
        self._weights = weights
        return self

    def adopt(self, in_use: Collection[int] = ()) -> int | None:
        newest = self._weights.newest
        if newest is None or newest == self._adopted:
            return self._version
        if in_use and not self._in_flight_update:
            if self._engine.versions_at_once == 1 or newest[1] in in_use:  # one of that number, of an exporter before
                return None
            if len(in_use) >= self._engine.versions_at_once:
                return self._version
        activity.doing(ADOPTING)
        try:
            with self._weights.lease() as view:
                self._adopted = None
                self._engine.load(dict(view.items()), view.version, in_use=in_use)
                version, adopted = view.version, (view.generation, view.version)
        except ExporterDiedError as error:
            if self._adopted is None:  # it died while its weights were loaded
                self._engine.forget_weights()
                if self._in_flight_update and in_use:
                    raise WeightsLostError(str(error)) from error
            raise PeerDiedError(str(error)) from error
        self._version, self._adopted = version, adopted
        return self._version

    def _submit(self, group: PreparedGroup) -> SampledGroup | None:
        """Make a request of each prompt; returns the group if the engine refuses one of them."""
        sampling = _SampledRequests(group, with_versions=self._in_flight_update)
        requests: list[str] = []
        for index, prompt_ids in enumerate(group.prompt_ids):
            request = next(self._request_ids)
            version = self._version if self._in_flight_update else group.version
            seed = group.seed_of(index) if self._deterministic else None
            images = group.images[index] if group.images else None
            try:
                self._engine.submit(
                    request, prompt_ids, seed=seed, version=version, own=group.job.sampling, images=images
                )
            except GeneratorError:
                raise
            except Exception as error:  # noqa: BLE001  # of a prompt, its images or its settings: it belongs to the group
                self._engine.abort(requests)
                for submitted in requests:
                    del self._requests[submitted]
                return SampledGroup(prepared=group, error=error)
            self._requests[request] = (sampling, index)
            requests.append(request)
        return None


class _SampledRequests:
    """A group that is being sampled."""

    def __init__(self, group: PreparedGroup, *, with_versions: bool) -> None:
        self.open = len(group.prompt_ids)  # completions that have not ended
        self.sampled = SampledGroup(prepared=group, tokens=[Tokens() for _ in group.prompt_ids])
        self._with_versions = with_versions

    def add(self, index: int, chunk: Chunk, version: int) -> None:
        new = chunk.tokens
        if self._with_versions:
            new = new.of_version(version)
        if self.sampled.prepared.job.purpose != "train":  # nobody computes a loss
            new = replace(new, kept=[b""] * len(new))
        self.sampled.tokens[index].extend(new)
        self.open -= chunk.finished
