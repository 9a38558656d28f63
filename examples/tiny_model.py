"""A random model of 20,000 parameters and its tokenizer, so that the examples need no download.

In a setup file of your own, `model="Qwen/Qwen3-0.6B"` replaces both.
"""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig

CHARACTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789 .,?!+-=:\n"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; a character that is not in `CHARACTERS` becomes a question mark."""
    vocabulary = {token: index for index, token in enumerate([*CHARACTERS, "<pad>", "<eos>"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The same random weights in every process."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def small_config(output_dir: str, kind: type[GRPOConfig] = GRPOConfig, **settings) -> GRPOConfig:
    """4 prompts of 4 completions a step, on a CPU where there is no GPU."""
    return kind(
        **{
            "output_dir": output_dir,
            "max_steps": 50,
            "per_device_train_batch_size": 16,
            "num_generations": 4,
            "max_completion_length": 16,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "bf16": False,
            "use_cpu": not torch.cuda.is_available(),
            **settings,
        }
    )
