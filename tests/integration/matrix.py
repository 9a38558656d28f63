"""Model families, adapters and settings: each trained by us at staleness 0 and by plain TRL on the same completions.

`test_matrix` runs the rows (`make test-matrix`), and `scripts/trl_table.py` makes a table of docs/trl.md of them. The
models are tiny, of random weights that are large enough to show a difference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOTrainer

from kit.tiny_trainer import build_tokenizer, build_trainer


def each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


TINY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
WIDE: dict[str, Any] = {**TINY, "intermediate_size": 64, "num_attention_heads": 2, "max_position_embeddings": 256}
SMALL: dict[str, Any] = {**WIDE, "num_key_value_heads": 1, "head_dim": 16}
SIZES_OF_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.3}
GPT: dict[str, Any] = {**SIZES_OF_GPT, **each("resid_pdrop embd_pdrop attn_pdrop", 0.0)}
EXPERTS: dict[str, Any] = {**SMALL, "num_experts_per_tok": 2}
MANY: dict[str, Any] = {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32}
MAMBA: dict[str, Any] = {**TINY, "state_size": 4}
AS_SMALL = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 smollm3 granite olmo olmo2 olmo3 cohere cohere2 "
    "glm glm4 stablelm starcoder2 nemotron helium exaone4 ernie4_5 hunyuan_v1_dense gpt_neox persimmon"
)
FAMILIES: dict[str, dict[str, Any]] = {
    **each(AS_SMALL, SMALL),
    "seed_oss": {**SMALL, **each("residual_dropout attention_dropout", 0.0)},
    "falcon": {**WIDE, "ffn_hidden_size": 64},
    "bloom": {"hidden_size": 32, **each("n_layer n_head", 2), "initializer_range": 0.3},
    "mpt": {"d_model": 32, **each("n_layers n_heads", 2), "max_seq_len": 256, "initializer_range": 0.3},
    "opt": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3, "dropout": 0.0},
    "gpt2": GPT,
    "gpt_neo": {
        "hidden_size": 32,
        **each("num_layers num_heads", 2),
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        **each("resid_dropout embed_dropout attention_dropout", 0.0),
    },
    "gptj": {**GPT, "rotary_dim": 8},
    "codegen": {**GPT, "n_head": 4, "rotary_dim": 4},
    "gpt_bigcode": GPT,
    "xglm": {
        "d_model": 32,
        "ffn_dim": 64,
        **each("num_layers attention_heads", 2),
        "max_position_embeddings": 256,
        "init_std": 0.3,
        **each("dropout attention_dropout", 0.0),
    },
    "biogpt": {**SMALL, **each("hidden_dropout_prob attention_probs_dropout_prob activation_dropout", 0.0)},
    **each("mixtral granitemoe phimoe gpt_oss", {**EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": {**MANY, "shared_expert_intermediate_size": 32},
    "qwen3_moe": MANY,
    "olmoe": {**EXPERTS, "num_experts": 4},
    "deepseek_v3": {
        **SMALL,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        **each("n_group topk_group first_k_dense_replace", 1),
        **each("head_dim qk_rope_head_dim qk_nope_head_dim", 8),
        **each("q_lora_rank kv_lora_rank v_head_dim", 16),
    },
    "lfm2": {**SMALL, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        **MANY,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        **each("linear_num_key_heads linear_num_value_heads", 2),
        **each("linear_key_head_dim linear_value_head_dim", 16),
    },
    "recurrent_gemma": {
        **SMALL,
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": 64,
        "w_init_variance_scale": 0.3,
    },
    "mamba": MAMBA,
    "mamba2": {**MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": MAMBA,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the matrix.

    Args:
        within: the relative difference up to which all metrics are equal.
        differs: why the sampler's log-probabilities are not the trainer's.
        fails: why TRL's own training does.
        refused: a part of the message.
    """

    family: str = "qwen3"
    model: Mapping[str, Any] = field(default_factory=dict)  # of its configuration
    build: Callable[[Any], Any] | None = None  # makes the model that is trained of the one that was built
    peft: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)  # of the `GRPOConfig`
    within: float = 1e-4
    differs: str = ""
    fails: str = ""
    refused: str = ""

    @property
    def verdict(self) -> str:
        """For the table."""
        if self.fails:
            return f"plain TRL ends with an error: {self.fails}"
        if self.refused:
            return f"refused at the start: {self.refused}"
        if self.differs:
            return f"differs, and the first batch shows it: {self.differs}"
        return "equal" if self.within < 1e-3 else f"equal within {self.within:.0%}, the rounding of its precision"


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})


def on(kind: type, **changes: Any) -> Any:
    return kind(**{"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})


ADAPTERS: dict[str, Any] = {
    "LoRA": lora(),
    "LoRA of all linear layers": lora(target_modules="all-linear"),
    "DoRA": lora(use_dora=True),
    "rsLoRA": lora(use_rslora=True),
    "LoRA with PiSSA": lora(init_lora_weights="pissa"),
    "LoRA with biases": lora(bias="lora_only"),
    "LoRA with `modules_to_save`": lora(modules_to_save=["lm_head"]),
    "LoRA of the embeddings": lora(target_modules=["embed_tokens", "q_proj"]),
    "LoRA with `layers_to_transform`": lora(layers_to_transform=[1]),
    "LoRA with trainable tokens": lora(trainable_token_indices=[1, 2, 3]),
    "IA3": on(peft.IA3Config, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": on(peft.VeraConfig, r=4),
    "OFT": on(peft.OFTConfig, r=0, oft_block_size=8),
    "BOFT": on(peft.BOFTConfig, boft_block_size=8),
    "LoHa": on(peft.LoHaConfig, r=4),
    "LoKr": on(peft.LoKrConfig, r=4),
    "HRA": on(peft.HRAConfig, r=4),
    "FourierFT": on(peft.FourierFTConfig, n_frequency=16),
    "RandLoRA": on(peft.RandLoraConfig, r=4),
    "VB-LoRA": on(peft.VBLoRAConfig, num_vectors=8, vector_length=4, r=2, topk=2),
    "LN tuning": peft.LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM"),
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "p-tuning": peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, task_type="CAUSAL_LM"),
    "prefix tuning": peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "AdaLoRA": on(peft.AdaLoraConfig, **each("init_r total_step", 4), target_r=2, **each("tinit tfinal deltaT", 1)),
}

ROPE = {"factor": 2.0, "rope_theta": 10000.0}
# Fields of the `GRPOConfig` are in `random_configurations` and `differential_rows`.
SETTINGS: dict[str, Row] = {
    "`attn_implementation` eager": Row(model={"attn_implementation": "eager"}),
    "`attn_implementation` sdpa": Row(model={"attn_implementation": "sdpa"}),
    "sliding window": Row(family="mistral", model={"sliding_window": 4}),
    "tied embeddings": Row(model={"tie_word_embeddings": True}),
    "untied embeddings": Row(model={"tie_word_embeddings": False}),
    "attention dropout": Row(model={"attention_dropout": 0.3}),
    "LoRA dropout": Row(peft=lora(lora_dropout=0.3, init_lora_weights=False)),
    "NEFTune": Row(config={"neftune_noise_alpha": 5.0}),
    "`use_reentrant`": Row(
        config={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    ),
    "bf16 mixed precision": Row(config={"bf16": True}, within=0.1),
    "a model in bf16": Row(build=lambda model: model.to(torch.bfloat16), within=0.1),
    "a model in fp16": Row(build=lambda model: model.to(torch.float16), within=0.02),
    "`cast_lm_head_to_fp32`": Row(
        model={"tie_word_embeddings": False},
        build=lambda model: model.to(torch.bfloat16),
        config={"cast_lm_head_to_fp32": True},
        within=0.1,
    ),
    "frozen layers": Row(build=lambda model: model.model.layers[0].requires_grad_(False) and model),
    "rope scaling": Row(family="llama", model={"rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "yarn": Row(
        family="llama",
        model={"rope_parameters": {**ROPE, "rope_type": "yarn", "original_max_position_embeddings": 128}},
    ),
    "logit softcapping": Row(family="gemma2", model={"final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0}),
    "`logits_scaling`": Row(family="granite", model={"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "`optim` adafactor": Row(config={"optim": "adafactor"}),
    "`max_grad_norm` 0": Row(config={"max_grad_norm": 0.0}),
    "`use_cache` off": Row(model={"use_cache": False}),
    "`cache_implementation` static": Row(config={"cache_implementation": "static"}),
}


def build(row: Row) -> Any:
    """The row's model, the same at each call."""
    tokenizer = build_tokenizer()
    changes = dict(row.model)
    attention = changes.pop("attn_implementation", None)
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    tokens["vocab_size"] = len(tokenizer)
    config = AutoConfig.for_model(row.family, **{**FAMILIES[row.family], **tokens, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, **({"attn_implementation": attention} if attention else {}))
    return row.build(model) if row.build else model


def get_trainer_of(row: Row, output_dir: Path) -> Callable[..., GRPOTrainer]:
    def get_trainer(arguments: dict[str, Any] | None = None) -> GRPOTrainer:
        adapter = {} if row.peft is None else {"peft_config": copy.deepcopy(row.peft)}
        both = {**adapter, **(arguments or {})}
        return build_trainer(output_dir, model=build(row), arguments=both, **row.config)

    return get_trainer


POSITIONS = "TRL passes no position ids, and the model counts the padding before a prompt"
SOFT_CAP = "TRL computes the probabilities that it trains on without its `logits_soft_cap`"
VIRTUAL = "virtual tokens before the padding of the prompts"
DROPOUT = "workers sample without dropout"
ODD: dict[str, dict[str, Any]] = {
    "family gpt2": {"differs": POSITIONS},
    "family gpt_bigcode": {"differs": POSITIONS},
    "family gpt_neo": {"differs": POSITIONS},
    "family xglm": {"differs": POSITIONS},
    "family biogpt": {"differs": POSITIONS},
    "family recurrent_gemma": {"differs": SOFT_CAP},
    "family granitemoe": {"fails": "no `num_experts`"},
    "family phimoe": {"fails": "no `num_experts`"},
    "adapter prompt tuning": {"refused": VIRTUAL},
    "adapter p-tuning": {"refused": VIRTUAL},
    "adapter prefix tuning": {"refused": VIRTUAL},
    "setting attention dropout": {"differs": DROPOUT},
    "setting LoRA dropout": {"differs": DROPOUT},
    "setting NEFTune": {"differs": "workers sample without the noise"},
}

PLAIN: dict[str, Row] = {
    **{f"family {name}": Row(family=name) for name in FAMILIES},
    **{f"adapter {name}": Row(peft=config) for name, config in ADAPTERS.items()},
    **{f"setting {name}": row for name, row in SETTINGS.items()},
}
ROWS = {name: replace(row, **ODD.get(name, {})) for name, row in PLAIN.items()}
