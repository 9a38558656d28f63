"""Sampling with continuous batching: groups join and leave between two steps of an engine such as vLLM's.

New weights, with `in_flight_update` off: no group starts until those in flight have ended, and then the weights are
adopted (a LoRA adapter needs no such pause: old and new are kept side by side). With `on` they are adopted between two
steps, the running requests continue with them, and every token is labelled with the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol

from async_grpo.errors import PeerDiedError
from async_grpo.rollout.engines import PreparedGroup, SampledGroup
from async_grpo.telemetry.activity import ADOPTING, activity
from async_grpo_ipc import ExporterDiedError

if TYPE_CHECKING:
    from torch import Tensor

    from async_grpo_ipc import RemoteWeights


@dataclass(slots=True)
class Chunk:
    """New tokens of one request, in the order of sampling."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]  # natural log, of the distribution that was sampled from
    finished: bool


class RequestEngine(Protocol):
    """An engine of requests, each of which is one completion; `VLLMEngine` says more about each method."""

    max_num_seqs: int

    @property
    def busy(self) -> bool: ...
    @property
    def versions_at_once(self) -> int: ...
    def submit(self, request_id: str, prompt_ids: list[int], *, seed: int | None, version: int) -> None: ...
    def step(self) -> list[Chunk]: ...
    def abort(self, request_ids: list[str]) -> None: ...
    def load(self, tensors: Mapping[str, Tensor], version: int, in_use: Collection[int] = ()) -> None: ...


class ContinuousEngine:
    """Samples groups as requests of `engine`.

    Args:
        deterministic: each completion is seeded by its job.
    """

    joins = True

    def __init__(
        self, engine: RequestEngine, *, group_size: int, in_flight_update: bool = False, deterministic: bool = False
    ) -> None:
        self.most_groups = max(1, engine.max_num_seqs // group_size)
        self._engine = engine
        self._in_flight_update = in_flight_update
        self._deterministic = deterministic
        self._requests: dict[str, tuple[_Sampling, int]] = {}  # request -> its group and its place there
        self._request_ids = map(str, count())
        self.version = -1  # of the engine's weights

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        ended = [failed for group in new if (failed := self._submit(group)) is not None]
        chunks = self._engine.step() if self._engine.busy else []
        for chunk in chunks:
            group, place = self._requests[chunk.request_id]
            group.add(place, chunk, self.version if self._in_flight_update else None)
            if chunk.finished:
                del self._requests[chunk.request_id]
                if not group.open:
                    ended.append(group.sampled)
        return ended

    def follow(self, weights: RemoteWeights) -> LoadedPolicy:
        return LoadedPolicy(weights, self, self._engine, in_flight_update=self._in_flight_update)

    def close(self) -> None:
        self._engine.abort(list(self._requests))
        self._requests.clear()

    def _submit(self, group: PreparedGroup) -> SampledGroup | None:
        """Make a request of each prompt; returns the group if the engine refuses one of them."""
        sampling = _Sampling(group, with_versions=self._in_flight_update)
        requests: list[str] = []
        for place, prompt_ids in enumerate(group.prompt_ids):
            request = next(self._request_ids)
            version = self.version if self._in_flight_update else group.version
            seed = group.seed_of(place) if self._deterministic else None
            try:
                self._engine.submit(request, prompt_ids, seed=seed, version=version)
            except ValueError as error:
                self._engine.abort(requests)
                for submitted in requests:
                    del self._requests[submitted]
                return SampledGroup(prepared=group, error=error)
            self._requests[request] = (sampling, place)
            requests.append(request)
        return None


class _Sampling:
    """A group that is being sampled."""

    def __init__(self, group: PreparedGroup, *, with_versions: bool) -> None:
        self.open = len(group.prompt_ids)  # completions that have not ended
        self.sampled = SampledGroup(
            prepared=group,
            token_ids=[[] for _ in group.prompt_ids],
            logprobs=[[] for _ in group.prompt_ids],
            versions=[[] for _ in group.prompt_ids] if with_versions else None,
        )

    def add(self, place: int, chunk: Chunk, version: int | None) -> None:
        self.sampled.token_ids[place].extend(chunk.token_ids)
        self.sampled.logprobs[place].extend(chunk.logprobs)
        if self.sampled.versions is not None and version is not None:
            self.sampled.versions[place].extend([version] * len(chunk.token_ids))
        self.open -= chunk.finished


class LoadedPolicy:
    """The published weights, loaded into an engine that has memory of its own for them."""

    def __init__(
        self, remote: RemoteWeights, sampler: ContinuousEngine, engine: RequestEngine, *, in_flight_update: bool
    ) -> None:
        self._remote = remote
        self._sampler = sampler
        self._engine = engine
        self._in_flight_update = in_flight_update
        self._adopted: tuple[str, int] | None = None  # generation and version

    def adopt(self, in_use: Collection[int] = ()) -> int | None:
        if self._adopted == (self._remote.generation, self._remote.version):
            return self._sampler.version
        if not self._in_flight_update and len(in_use) >= self._engine.versions_at_once:
            return None if self._engine.versions_at_once == 1 else self._sampler.version
        activity.doing(ADOPTING)
        try:
            with self._remote.lease() as view:
                self._engine.load(dict(view.items()), view.version, in_use=in_use)
                self._sampler.version = view.version
                self._adopted = (view.generation, view.version)
        except ExporterDiedError as error:
            raise PeerDiedError(str(error)) from error
        return self._sampler.version

    def release(self) -> None:
        """The engine has a copy; nothing is held."""
