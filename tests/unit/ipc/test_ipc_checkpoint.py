"""Published tensors under a checkpoint's names, with the adapter merged as PEFT merges it."""

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from async_grpo_ipc.checkpoint import Adapter, checkpoint

SMALL: dict[str, Any] = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(**SMALL, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )


def gpt2() -> nn.Module:
    """Its layers store their weights transposed (`fan_in_fan_out`)."""
    return GPT2LMHeadModel(GPT2Config(**SMALL, n_embd=8, n_layer=1, n_head=2, n_positions=8))


@pytest.mark.parametrize(
    ("build", "modules"), [(llama, ["q_proj", "down_proj"]), (llama, ["embed_tokens", "v_proj"]), (gpt2, ["c_attn"])]
)
def test_an_adapter_is_merged_as_peft_merges_it(build: Any, modules: list[str]) -> None:
    config = LoraConfig(r=2, lora_alpha=8, target_modules=modules, init_lora_weights=False, use_rslora=True)
    model = get_peft_model(build(), config)
    layers = {
        name: (module.scaling["default"], bool(getattr(module, "fan_in_fan_out", False)) or "Emb" in str(type(module)))
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    adapter = Adapter.of_json(json.loads(json.dumps(Adapter("default", layers).as_json())))
    found = dict(checkpoint(((name, p.detach()) for name, p in model.named_parameters()), adapter))
    merged = model.merge_and_unload()
    expected = {name: p.detach() for name, p in merged.named_parameters()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-5, msg=name)


def test_tied_weights_come_once() -> None:
    weight = torch.ones(3)
    tensors = {"embed.weight": weight, "head.weight": weight.view(3), "bias": torch.zeros(3)}
    assert list(dict(checkpoint(tensors.items()))) == ["embed.weight", "bias"]
