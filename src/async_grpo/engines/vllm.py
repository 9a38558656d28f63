"""vLLM's engine inside a worker process. Every private name of vLLM that we touch is here, in `vllm_images` or in
`vllm_hooks`, and what its sampler takes and returns in `vllm_sampling`.

The engine is ours, or the one that Unsloth put into the model (`fast_inference=True`), whose base weights are the
model's own: then only the adapter is taken on.

The engine core runs in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), so its model's parameters are at hand: new
weights are copied from the mapped memory straight into them, the first time by the model's own `load_weights`, which
knows how q, k and v, or gate and up, are fused, and from then on by the same copies (`async_grpo_ipc.recording`).
`tests/with_vllm/test_vllm_engine.py` names the private name that moved.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import set_seed

from async_grpo.engines import Chunk
from async_grpo.engines.vllm_hooks import BuildersStream, choose_model_runner
from async_grpo.engines.vllm_images import ENGINE_OPTIONS, ImagePrompts, process_with, refuse_adapted_encoder
from async_grpo.engines.vllm_options import (
    adapter_of,
    describe_model,
    engine_options,
    needs_text,
    refuse_image_settings,
    refuse_several_gpus,
    sampling_options,
    sees_images,
)
from async_grpo.engines.vllm_sampling import (
    RETURN_KEPT,
    cannot_return_kept,
    kept_of,
    parameters,
    require_kept,
    set_own,
)
from async_grpo.engines.vllm_weights import NO_FAST_INFERENCE, names_of, plain, require_same_base
from async_grpo.errors import UnsupportedError
from async_grpo.rundir.files import fresh_folder
from async_grpo.setup.generator_choice import NO_IMAGES, engine_inside
from async_grpo.tokens import Tokens
from async_grpo_ipc.checkpoint import checkpoint
from async_grpo_ipc.recording import RecordedCopies, record

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers share the cores: none of them may claim one for itself
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # with `PROCESSED` it is never taken, and asking for it needs flashinfer
}
PROCESSED = "processed_logprobs"  # of the distribution that is sampled from, after temperature, top_p, ...
CPU_BLOCK = 32  # tokens; whole blocks are cached, and vLLM's 128 are more than a short dialogue has at its second turn
ADAPTERS_AT_ONCE = 2  # old groups finish under the old adapter while new ones start under the new


class VLLMEngine:
    """One engine, fed by one thread: `submit` requests, `step` until they are done, `load` new weights in between.

    Args:
        in_flight_update: `load` may come while requests run; they continue with the new weights, and every token is
            handed out by the step that sampled it.
        deterministic: the same requests give the same tokens.
        returns_kept: every token comes with those that truncated sampling kept.
        folder: where our own engine is described while it is built; its contents are deleted. None: a temporary
            folder, which remains if the process is killed meanwhile.
        changes: other arguments of vLLM's `EngineArgs`, of an engine that is ours.

    Raises:
        UnsupportedError: the sampling parameters, the adapter or the model's own engine do not suit.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        seed: int,
        in_flight_update: bool = False,
        deterministic: bool = False,
        returns_kept: bool = False,
        folder: Path | None = None,
        **changes: Any,
    ) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options = sampling_options(trainer)
        self._sees_images = sees_images(trainer)
        self._with_text = needs_text(options) or self._sees_images
        self._sampling = parameters(options, every_token=in_flight_update)
        self._adapter = adapter_of(trainer.model)
        self._in_flight_update, self._deterministic = in_flight_update, deterministic
        self._returns_kept = returns_kept
        inside = engine_inside(trainer.model)
        self._engine = self._build(trainer, folder, seed, **changes) if inside is None else self._take(inside, seed)
        self._stream = BuildersStream()
        self._shares_weights_of: torch.nn.Module | None = None if inside is None else trainer.model
        settings = self._engine.vllm_config
        self.max_num_seqs = int(settings.scheduler_config.max_num_seqs)
        self.max_model_len = int(settings.model_config.max_model_len)
        self._adapters_at_once = min(ADAPTERS_AT_ONCE, settings.lora_config.max_loras) if self._adapter else 0
        self._runner = self._engine.model_executor.driver_worker.worker.model_runner
        from async_grpo_ipc.vllm_engine import weights_stay_as_loaded

        self._in_place = weights_stay_as_loaded(self._runner.get_model())
        self._images = ImagePrompts(self._engine) if self._sees_images and inside is None else None
        self._copies: RecordedCopies | None = None
        self._recorded = False  # the first load was, to find its copies; not every model has them
        self._base_loaded = False
        self._adapters: dict[int, LoRARequest] = {}  # by policy version
        self._loaded = -1  # version
        self._adapters_loaded = 0
        self._incoming: dict[str, Tensor] = {}  # the adapter that is being loaded
        if self._adapter:
            if self._images is not None:
                refuse_adapted_encoder(trainer.model, self._runner.get_model())
            self._load_adapters_from_memory()

    @property
    def versions_at_once(self) -> int:
        """How many policy versions requests can be in flight with."""
        return self._adapters_at_once or 1

    # Requests

    @property
    def busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    def submit(
        self,
        request_id: str,
        prompt_ids: list[int],
        *,
        seed: int | None,
        version: int,
        own: dict[str, Any] | None = None,
        images: Sequence[Any] | None = None,
    ) -> None:
        """Queue one completion, to be sampled by `version`.

        Args:
            own: sampling settings of its job, in place of the trainer's.
            images: of the prompt, as PIL has them.

        Raises:
            ValueError: vLLM refuses the prompt: it is empty, too long for the model, or has images that do not fit; or
                the settings.
            UnsupportedError: this engine takes no images.
        """
        from vllm.exceptions import VLLMValidationError

        sampling = self._sampling  # which vLLM copies
        if seed is not None or own:
            sampling = sampling.clone()
            sampling.seed = seed
            set_own(sampling, own or {}, returns_kept=self._returns_kept)
        try:
            prompt = self._with_images(prompt_ids, images) if images else {"prompt_token_ids": prompt_ids}
            self._engine.add_request(request_id, prompt, sampling, lora_request=self._adapters.get(version))
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error

    def _with_images(self, prompt_ids: list[int], images: Sequence[Any]) -> Any:
        if self._images is None:
            raise UnsupportedError(NO_IMAGES)
        if self._deterministic and not self.busy:
            self._images.forget_encoded()  # of the groups before: images would be computed in other batches
        return self._images.rendered(prompt_ids, images)

    def step(self) -> list[Chunk]:
        """Decode once; what is finished, or with `in_flight_update` every new token."""
        self._stream.use()
        chunks = []
        for output in self._engine.step():
            (completion,) = output.outputs
            logprobs = completion.logprobs.logprobs if completion.logprobs else []
            tokens = Tokens(list(completion.token_ids), list(logprobs))
            if self._returns_kept:
                tokens.kept = kept_of(completion)
            chunks.append(Chunk(output.request_id, tokens, output.finished))
        return chunks

    def abort(self, request_ids: list[str]) -> None:
        self._engine.abort_request(request_ids)

    # Weights

    def load(self, tensors: Mapping[str, Tensor], version: int, in_use: Collection[int] = ()) -> None:
        """Take on the weights `tensors`, named as in the trainer's model; they are not kept.

        Args:
            in_use: versions that requests in flight were submitted with; adapters of others are dropped.

        Raises:
            UnsupportedError: vLLM's model has parameters that the trainer does not publish.
        """
        self._stream.use()
        if self._adapter is None:
            self._load_base(tensors)
        else:
            if not self._base_loaded:
                if self._shares_weights_of is None:
                    self._load_base(tensors)
                else:
                    require_same_base(self._shares_weights_of, tensors)
                self._base_loaded = True
            for old in set(self._adapters) - set(in_use):
                self._engine.remove_lora(self._adapters.pop(old).lora_int_id)
            self._loaded = version  # also where the copy fails: `forget_weights` drops this one, and no earlier one
            self._adapters[version] = self._add_adapter(tensors)
            if not self._in_flight_update:
                return  # cached prefixes are kept under the adapter's name, and each version has its own
        self._engine.reset_prefix_cache(reset_running_requests=self._in_flight_update)
        if self._images is not None and self._adapter is None:  # an adapter leaves what computes images as it is
            self._images.forget_encoded()

    def forget_weights(self) -> None:
        """What was loaded last was not what the trainer published: the next `load` loads everything.

        An adapter of it is dropped at once. Beside the next one, it would push out the one that requests in flight
        use, and vLLM would load that again: from `_incoming`, which has the next one's tensors by then.
        """
        self._base_loaded = False
        lost = None if self._in_flight_update else self._adapters.pop(self._loaded, None)
        if lost is not None:
            self._engine.remove_lora(lost.lora_int_id)

    def _load_base(self, tensors: Mapping[str, Tensor]) -> None:
        weights = dict(checkpoint(tensors.items()))
        if not self._in_place:
            self._runner.reload_weights(weights_iterator=iter(weights.items()))
            return
        with torch.no_grad():
            if self._copies is not None and self._copies.fits(weights):
                self._copies.repeat(weights)
            elif self._recorded:
                self._load_all(weights)
            else:
                self._copies = record(lambda: self._load_all(weights), self._runner.get_model(), weights)
                self._recorded = True

    def _load_all(self, weights: Mapping[str, Tensor]) -> None:
        model = self._runner.get_model()
        loaded = model.load_weights(iter(weights.items()))
        kept = model.state_dict()  # vLLM has put random numbers into its buffers; a `_k_scale` is not of a model
        buffers = (it for it, own in model.named_buffers() if it in kept and own.is_floating_point() and "._" not in it)
        wanted = {plain(name) for name in (*dict(model.named_parameters()), *buffers)}
        missing = sorted(wanted - {plain(name) for name in loaded})
        if missing:
            raise UnsupportedError(
                f"vLLM's model has {len(missing)} parameters that the trainer does not publish, the first is "
                f"{missing[0]}. Take --generator hf for this model."
            )

    def _add_adapter(self, tensors: Mapping[str, Tensor]) -> LoRARequest:
        """Copy the adapter's tensors into the engine; returns what names it in requests."""
        from vllm.lora.request import LoRARequest

        assert self._adapter is not None
        name = f".{self._adapter[0]}."
        self._incoming = {
            key.replace(name, "."): tensor.clone() for key, tensor in tensors.items() if ".lora_" in key and name in key
        }
        self._adapters_loaded += 0 if self._in_flight_update and self._adapters_loaded else 1
        number = self._adapters_loaded
        again = {"load_inplace": True} if self._in_flight_update else {}  # under the same number
        self._engine.add_lora(LoRARequest(f"adapter-{number}", number, "memory", **again))
        return LoRARequest(f"adapter-{number}", number, "memory")

    def _load_adapters_from_memory(self) -> None:
        """Let the LoRA manager take the tensors that `load` was given, where it would read a directory."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        assert self._adapter is not None
        manager = self._runner.lora_manager
        described = self._adapter[1].to_dict()
        modules = self._adapter[1].target_modules
        described["target_modules"] = modules if isinstance(modules, str) else sorted(modules)
        helper = PEFTHelper.from_dict(described)
        try:
            helper.validate_legal(manager.lora_config)
        except ValueError as error:
            raise UnsupportedError(f"{error} Take --generator hf.") from error

        dtype, names = manager.lora_config.lora_dtype, names_of(self._runner.get_model())

        def load_adapter(request: LoRARequest) -> LoRAModel:
            return LoRAModel.from_lora_tensors(
                request.lora_int_id, self._incoming, helper, device="cpu", dtype=dtype, weights_mapper=names
            )

        manager._load_adapter = load_adapter

    # Start and end

    def _take(self, llm: Any, seed: int) -> LLMEngine:
        """The engine that Unsloth put into the model. `UnsupportedError`: it cannot serve this run."""
        _require_suitable(
            llm,
            self._adapter,
            in_flight_update=self._in_flight_update,
            deterministic=self._deterministic,
            returns_kept=self._returns_kept,
        )
        set_seed(seed)  # Unsloth starts every engine with the same one
        engine: LLMEngine = llm.llm_engine
        return engine

    def _build(self, trainer: Any, folder: Path | None, seed: int, **changes: Any) -> LLMEngine:
        """An engine for the trainer's model, without weights."""
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        refuse_several_gpus(trainer)
        on_cpu = torch.device(trainer.accelerator.device).type == "cpu"
        if on_cpu:
            keep_weights_unpacked()
        else:
            choose_model_runner(os.environ)
        with fresh_folder(folder) if folder else TemporaryDirectory(prefix="async-grpo-engine-") as described:
            describe_model(trainer, Path(described), with_text=self._with_text)
            if self._sees_images:
                refuse_image_settings(trainer)
                process_with(trainer.processing_class, str(described))
            arguments = {
                "model": str(described),
                "skip_tokenizer_init": not self._with_text,
                "load_format": "dummy",  # the weights come from the trainer
                "logprobs_mode": PROCESSED,
                "disable_log_stats": True,
                "enforce_eager": on_cpu,
                **({"block_size": CPU_BLOCK} if on_cpu else {}),
                # A step then returns the tokens that it sampled, so their version is known.
                **({"async_scheduling": False} if self._in_flight_update or self._deterministic else {}),
                **(ENGINE_OPTIONS if self._sees_images else {}),
                **engine_options(trainer, seed=seed, deterministic=self._deterministic),
                **({"max_loras": 1 if self._in_flight_update else ADAPTERS_AT_ONCE} if self._adapter else {}),
                **(require_kept(EngineArgs) if self._returns_kept else {}),
                **changes,
            }
            try:
                # As `vllm.LLM`: on a GPU a step prefills 16,384 tokens then, and not 2,048.
                return LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
            except ValueError as error:
                if self._returns_kept:
                    raise cannot_return_kept(error) from error
                raise

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _require_suitable(
    llm: Any, adapter: tuple[str, Any] | None, *, in_flight_update: bool, deterministic: bool, returns_kept: bool
) -> None:
    """Raise `UnsupportedError` for an engine of Unsloth's that cannot serve this run."""
    engine = llm.llm_engine
    settings = engine.vllm_config
    reasons = {
        "the model has no LoRA adapter, and the engine shares the weights that train": adapter is None,
        "it runs in a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING)": not hasattr(engine, "model_executor"),
        "it was started without adapters (enable_lora)": settings.lora_config is None,
        "it has no adapters on attention (UNSLOTH_VLLM_MERGED_ROLLOUT)": getattr(
            llm, "_unsloth_lora_without_attention", False
        ),
        f"its log-probabilities are {settings.model_config.logprobs_mode}": (
            settings.model_config.logprobs_mode != PROCESSED
        ),
        f"it was started without {RETURN_KEPT}, which truncated sampling (top_p, top_k, min_p) needs": (
            returns_kept and not getattr(settings.model_config, RETURN_KEPT, False)
        ),
        "it caches prefixes, which --deterministic cannot have": deterministic,
        "it schedules ahead, so --in-flight-update on could not tell which weights sampled a token": in_flight_update,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedError(
                f"The vLLM that Unsloth put into the worker's model cannot be used: {reason}. {NO_FAST_INFERENCE}"
            )


def keep_weights_unpacked() -> None:
    """On a CPU vLLM would pack linear layers for oneDNN and drop their weights; ours are written again and again."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
