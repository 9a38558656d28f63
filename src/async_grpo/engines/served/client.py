"""What engines share that ask a vLLM server for completions: TRL's own client, with deadlines and sentences.

What we touch of that client is in this file; `tests/integration/test_vllm_server.py` names what moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import islice
from threading import Thread
from typing import Any, Generic, TypeVar

import requests
from trl.generation.vllm_client import VLLMClient

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.engines.batch_engine import BatchEngine, Decoding
from async_grpo.engines.vllm_options import adapter_of, sampling_options
from async_grpo.errors import GeneratorError, UnsupportedError, WaitTimeoutError
from async_grpo.log import logger
from async_grpo.redaction import Redactor
from async_grpo.setup.generator_choice import NO_IMAGES
from async_grpo.telemetry.waiting import SAY_EVERY_S, wait_until
from async_grpo.tokens import as_tokens

HOOKS = ("check_server", "_get", "_post", "init_communicator", "update_named_params", "generate")  # of VLLMClient
GENERATION_S = 3600.0  # for all completions of a batch
WEIGHTS_S = 600.0  # for a version to be sent
CACHE_S = 60.0  # for the server to drop cached prefixes
LOOK_S = 5.0  # for a sign of life
POLL_S = 0.02
DISTRIBUTION = "processed_logprobs"  # of the distribution that was sampled from, after temperature, top_p, ...
T = TypeVar("T")


class ServerEngine(BatchEngine):
    """Asks for all completions of a batch in one request. A subclass has the client, and brings the weights."""

    _client: Client

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.args.generation_batch_size // trainer.num_generations)
        refuse_what_cannot_be_sent(trainer.model)
        self._options = sampling_options(trainer)
        del self._options["detokenize"]  # of an engine; a server always has its tokenizer

    def _decode(self, groups: Sequence[PreparedGroup]) -> Decoding:
        """All completions come in one answer. Those of a job with a shorter limit are cut at it.

        Raises:
            ValueError: the server refuses the prompts, for example one that is too long for its model.
            GeneratorError: it does not answer.
            UnsupportedError: a prompt has images.
        """
        if any(group.images is not None for group in groups):
            raise UnsupportedError(NO_IMAGES)
        prompts, copies = _each_once([group.prompt_ids for group in groups])
        limits = [group.job.sampling.get("max_tokens", self._options["max_tokens"]) for group in groups]
        options = {**self._options, **groups[0].job.sampling, "max_tokens": max(limits)}
        ask = partial(self._client.generate, prompts, n=copies, logprobs=0, generation_kwargs=options)
        answer = yield from self._answer(ask, f"{len(prompts) * copies} completions of the vLLM server")
        logprobs = [[logprob for (logprob,) in positions] for positions in answer["logprobs"]]
        completions = iter(as_tokens(answer["completion_ids"], logprobs))
        yield [
            SampledGroup(prepared=group, tokens=[it[:limit] for it in islice(completions, len(group.prompt_ids))])
            for group, limit in zip(groups, limits, strict=True)
        ]

    def _answer(self, ask: Callable[[], T], what: str) -> Generator[list[SampledGroup], None, T]:
        request = ServerCall(self._client, ask, what, GENERATION_S)
        while not request.done():
            yield []
        return request.result()

    def _drop_prefixes(self) -> None:
        wait_until(self._client.drops_prefixes, what="the vLLM server to drop cached prefixes", timeout_s=CACHE_S)

    def _wait_for(self, call: Callable[[], T], what: str, timeout_s: float) -> T:
        running = ServerCall(self._client, call, what, timeout_s)
        while not running.done():
            pass
        return running.result()


class ServerCall(Generic[T]):
    """A call in a thread of its own, as neither HTTP nor NCCL can be interrupted.

    When `done` raises, the thread is left behind and the process is to end.
    """

    def __init__(self, client: Client, call: Callable[[], T], what: str, timeout_s: float) -> None:
        self._client, self._what, self._timeout_s = client, what, timeout_s
        self._outcome: Future[T] = Future()
        self._started = self._looked = time.monotonic()
        Thread(target=self._make, args=(call,), name="vllm-server", daemon=True).start()

    def _make(self, call: Callable[[], T]) -> None:
        try:
            self._outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001  # `result` raises it
            self._outcome.set_exception(error)

    def done(self) -> bool:
        """Wait a moment for the end of the call; check from time to time that the server is alive."""
        if wait([self._outcome], POLL_S).done:
            return True
        now = time.monotonic()
        waited = now - self._started
        if waited > self._timeout_s:
            raise GeneratorError(
                f"Timed out after {self._timeout_s:.0f} s waiting for {self._what}. {self._client.how_to_start}"
            )
        if now - self._looked > SAY_EVERY_S:
            self._looked = now
            self._client.require_alive()
            logger.info("waiting for {} ({:.0f} s so far)", self._what, waited)
        return False

    def result(self) -> T:
        return self._outcome.result()


class Client(VLLMClient):
    """TRL's client, with deadlines, no request sent twice, and sentences for a person."""

    @property
    def shown(self) -> str:
        """Its address for messages: without a password."""
        return Redactor()(self.base_url)

    @property
    def how_to_start(self) -> str:
        return (
            "Start the server as TRL wants it: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config "
            f'\'{{"backend": "nccl"}}\' --logprobs-mode {DISTRIBUTION} (or `trl vllm-serve --model MODEL`).'
        )

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Wait for the server to be up; part of TRL's constructor."""
        self.session = requests.Session()  # TRL's sends again what may have been carried out already
        try:
            wait_until(
                lambda: self._health() == "up" or None,
                what=f"the vLLM server at {self.shown}",
                timeout_s=total_timeout,
                poll_s=retry_interval,
            )
        except WaitTimeoutError as error:
            raise GeneratorError(f"{error} {self.how_to_start}") from error

    def require_alive(self) -> None:
        if self._health() == "gone":
            raise GeneratorError(f"The vLLM server at {self.shown} is gone. {self.how_to_start}")

    def _health(self) -> str:
        try:
            response = requests.get(f"{self.base_url}/health", timeout=LOOK_S)
        except requests.Timeout:
            return "busy"
        except requests.RequestException:
            return "gone"
        return "up" if response.status_code == 200 else "gone"

    def require_distribution(self) -> None:
        """Raise unless the log-probabilities that come back are those of the distribution that was sampled from."""
        config = self._get(f"{self.base_url}/server_info", params={"config_format": "json"})["vllm_config"]
        mode = config["model_config"]["logprobs_mode"]
        if mode != DISTRIBUTION:
            raise UnsupportedError(
                f"The vLLM server at {self.shown} returns {mode}, which are not those of the distribution that it "
                f"samples from. {self.how_to_start}"
            )

    def drops_prefixes(self) -> bool | None:
        """Whether all cached prefixes are dropped now: not so (None) while the server works for somebody."""
        return self._post(f"{self.base_url}/reset_prefix_cache").get("success") or None

    def _get(self, url: str, **changes: Any) -> dict[str, Any]:
        return self._ask("GET", url, **changes)

    def _post(self, url: str, **changes: Any) -> dict[str, Any]:
        return self._ask("POST", url, **changes)

    def _ask(self, method: str, url: str, **changes: Any) -> dict[str, Any]:
        generates = url.endswith("/v1/completions")
        longest_s = GENERATION_S if generates else WEIGHTS_S
        try:
            response = self.session.request(method, url, timeout=(LOOK_S, longest_s + LOOK_S), **changes)
        except requests.RequestException as error:
            raise GeneratorError(
                f"The vLLM server at {self.shown} does not answer ({error}). {self.how_to_start}"
            ) from error
        if response.status_code == 200:
            return dict(response.json())
        answer = f"The vLLM server answered {Redactor()(url)} with {response.status_code}: {response.text[:500]}"
        if generates and response.status_code < 500:
            raise ValueError(answer)
        if response.status_code == 404:
            raise UnsupportedError(f"{answer}\n{self.how_to_start}")
        raise GeneratorError(answer)


def _each_once(groups: Sequence[list[list[int]]]) -> tuple[list[list[int]], int]:
    """The prompts to send, and the completions to ask of each. A prompt that its whole group shares is sent once."""
    copies = len(groups[0])
    if all(len(prompts) == copies and all(ids == prompts[0] for ids in prompts) for prompts in groups):
        return [prompts[0] for prompts in groups], copies
    return [ids for prompts in groups for ids in prompts], 1


def refuse_what_cannot_be_sent(model: Any) -> None:
    if getattr(model, "is_quantized", False):
        raise UnsupportedError(
            'vllm_mode="server": a quantised model cannot be sent to a server. Take --generator hf, or a base that is '
            "not quantised."
        )
    adapter = adapter_of(model)
    if adapter is None:
        return
    for option in ("use_dora", "lora_bias", "target_parameters"):
        if getattr(adapter[1], option, None):
            raise UnsupportedError(
                f'vllm_mode="server": an adapter with {option} cannot be merged one tensor at a time. Take '
                "--generator hf."
            )
