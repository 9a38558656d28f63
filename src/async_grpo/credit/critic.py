"""The critic of PPO: a model that says for each token what reward is still to come, and its own optimizer.

V_t is what the critic says at the token before t: it has read the prompt and what was written before. Its weights are
in fp32, under the trainer's autocast; its learning rate is constant, without weight decay.

    checkpoint-N/critic/
        model.safetensors
        optimizer.safetensors  the moments of each weight, and in its metadata the groups and the coefficient of KL
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer, PreTrainedConfig

from async_grpo.setup.pieces import Pieces
from async_grpo.setup.trl_compat import is_adapter

FOLDER = "critic"
_WEIGHTS, _OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_ABOUT = "about"  # one key: safetensors writes several in any order, and equal runs have equal files
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole in the main memory, also of shards
_WHERE = ("revision", "trust_remote_code", "cache_dir", "local_files_only")  # of a policy's `model_init_kwargs`


class Critic:
    """A critic in training.

    Args:
        model: on any device; returns an object with `logits` [B, P + T, 1].
        learning_rate, max_grad_norm: of its own optimizer.
        pieces: computes batches without their padding; None: with it.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        *,
        learning_rate: float,
        max_grad_norm: float,
        pieces: Pieces | None = None,
    ) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
        self._accelerator, self._max_grad_norm = accelerator, max_grad_norm
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self._pieces = pieces

    def values(self, batch: Mapping[str, Tensor], rows: int | None = None) -> Tensor:
        """Compute the value of each token of the completions before it was written, [B, T].

        Args:
            rows: completions at a time; None: all.
        """
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        width, rows = batch["completion_ids"].shape[1], rows or len(ids)

        def compute(ids: Tensor, mask: Tensor, _asked: Tensor, width: int) -> tuple[Tensor]:
            return (self.model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1, 0].float(),)

        if self._pieces is None:
            parts = zip(torch.split(ids, rows), torch.split(mask, rows), strict=True)
            return torch.cat([compute(ids, mask, mask, width)[0] for ids, mask in parts])
        values: Any = self._pieces(self.model, compute, ids, mask, width, rows)[0][0]
        return values

    def old_values(self, batch: Mapping[str, Tensor], rows: int) -> Tensor:
        """Compute `values` of a generation batch as they are before any update on it, `rows` completions at a time."""
        self.model.eval()
        with torch.no_grad():
            return self.values(batch, rows)

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Run a forward and a backward pass in this block; gradients are reduced over processes in the last only."""
        self.model.train()
        with nullcontext() if last else self._accelerator.no_sync(self.model):
            yield

    def step(self) -> float:
        """Take an optimizer step; returns the norm of the gradient before it was clipped."""
        norm = self._accelerator.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def save(self, checkpoint: Path, kl_coef: float) -> None:
        """Add the critic to a checkpoint. Every process calls it: where the critic is sharded, each has a part."""
        weights: Any
        moments: Any
        weights, moments = get_state_dict(self.model, self.optimizer.optimizer, options=_WHOLE)
        if self._accelerator.is_main_process:
            folder = checkpoint / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            save_file(_apart(weights), folder / _WEIGHTS)
            about = {"param_groups": moments["param_groups"], "kl_coef": kl_coef}
            of_each = {f"{name}/{field}": it for name, state in moments["state"].items() for field, it in state.items()}
            save_file(_apart(of_each), folder / _OPTIMIZER, metadata={_ABOUT: json.dumps(about)})

    def load(self, checkpoint: Path) -> float:
        """Continue as `checkpoint` says, at this start's learning rate; returns its coefficient of KL.

        Raises:
            ValueError: the checkpoint has no critic.
        """
        folder = checkpoint / FOLDER
        if not (folder / _OPTIMIZER).is_file():
            raise ValueError(
                f"{checkpoint} has no critic: another trainer wrote it, or save_only_model=True did. Start over from "
                "its model, or resume from a checkpoint that PPOTrainer wrote."
            )
        rate = self.optimizer.param_groups[0]["lr"]
        weights: Any = load_file(folder / _WEIGHTS)
        moments, about = _read_moments(folder / _OPTIMIZER)
        set_state_dict(
            self.model,
            self.optimizer.optimizer,
            model_state_dict=weights,
            optim_state_dict=moments,
            options=_WHOLE,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return float(about["kl_coef"])


def _apart(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copy tensors that may share memory, as safetensors wants them."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def _read_moments(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the optimizer's state by the names of weights, and what is beside it."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()[_ABOUT])
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(path).items():
        weight, _, field = name.rpartition("/")
        state.setdefault(weight, {})[field] = tensor
    return {"state": state, "param_groups": about["param_groups"]}, about


def made_for(policy: Any, name: str | None, loading: Mapping[str, Any] | None, seed: int) -> nn.Module:
    """Make a fresh critic: the body of a language model, and a head with random weights of this seed.

    Args:
        name: path or hub name; None: the policy gives its body, as it is now.
        loading: the `model_init_kwargs` of the policy.

    Raises:
        ValueError: the policy has adapters or quantised weights, and no path that the weights below could be read from.
    """
    copied = name is None and not (is_adapter(policy) or getattr(policy, "is_quantized", False))
    source = name or str(getattr(policy.config, "_name_or_path", ""))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if copied:
            critic: Any = AutoModelForTokenClassification.from_config(for_values(policy.config), dtype=torch.float32)
            critic.base_model.load_state_dict(policy.base_model.state_dict())
            return critic
        if not source:
            raise ValueError(
                "The policy has adapters or quantised weights, and was not loaded from a path, so a critic cannot have "
                "the weights below them. Set critic_model in the PPOConfig, or give PPOTrainer(critic=module)."
            )
        where = where_to_load(name, loading)
        config = for_values(AutoConfig.from_pretrained(source, **where))
        return AutoModelForTokenClassification.from_pretrained(source, config=config, dtype=torch.float32, **where)


def where_to_load(name: str | None, loading: Mapping[str, Any] | None) -> dict[str, Any]:
    """Pick the arguments of `from_pretrained` that the policy's repository was loaded with; another has none."""
    return {} if name is not None else {key: value for key, value in (loading or {}).items() if key in _WHERE}


def for_values(config: PreTrainedConfig) -> PreTrainedConfig:
    """Change a copy of a language model's configuration to one label a token, and no dropout."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    config.use_cache = False
    dropouts = [key for key, value in vars(config).items() if "drop" in key and isinstance(value, float)]
    for key in [*dropouts, "classifier_dropout"]:
        setattr(config, key, 0.0)
    return config


def refuse_unfit(critic: nn.Module) -> None:
    """Raise `ValueError` unless a module gives one number a token."""
    device = next((parameter.device for parameter in critic.parameters()), None)
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    with torch.no_grad():
        found = critic(input_ids=ids, attention_mask=torch.ones_like(ids))
    shape = tuple(getattr(getattr(found, "logits", None), "shape", ()))
    if shape != (1, 2, 1):
        raise ValueError(
            f"critic must return logits of the shape [B, T, 1], one number a token, got {list(shape)} for two tokens. "
            "AutoModelForTokenClassification with num_labels=1 is such a model."
        )


def refuse_another_text(policy: Any, tokenizer: Any, name: str | None) -> None:
    """Raise `ValueError` where no critic can be made of a model, or it reads other tokens or shorter texts.

    Args:
        name: of the model; None: the policy.
    """
    config = policy.config if name is None else AutoConfig.from_pretrained(name)
    if type(config) not in AutoModelForTokenClassification._model_mapping:
        raise ValueError(
            f"transformers has no model with a {type(config).__name__} that gives one number a token. Set critic_model "
            "in the PPOConfig to another, or give PPOTrainer(critic=module)."
        )
    if name is None:
        return
    if AutoTokenizer.from_pretrained(name).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"critic_model={name!r} has another tokenizer than the policy, so it would read other words. Take a model "
            "with the policy's tokenizer; without critic_model, the critic begins as the policy."
        )
    reads, policys = (getattr(it.get_text_config(), "max_position_embeddings", None) for it in (config, policy.config))
    if reads and policys and reads < policys:
        raise ValueError(
            f"critic_model={name!r} reads {reads} tokens, and the policy {policys}. Take a model that reads as many."
        )


def parameters_of(policy: Any, critic: nn.Module | None, name: str | None, loading: Mapping[str, Any] | None) -> int:
    """Count the numbers of a critic that is not made yet; no weights are loaded."""
    if critic is not None:
        return sum(parameter.numel() for parameter in critic.parameters())
    config = policy.config if name is None else AutoConfig.from_pretrained(name, **where_to_load(name, loading))
    with torch.device("meta"):
        made = AutoModelForTokenClassification.from_config(for_values(config))
    return sum(parameter.numel() for parameter in made.parameters())
