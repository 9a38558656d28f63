"""A setup file: get_trainer() returns the trl.GRPOTrainer that Async-GRPO trains.

As it is, it needs no GPU and no download: a random model of 20,000 parameters learns to repeat a letter, and the
mean reward rises from 0.1 to over 0.5 in 100 steps.

    async-grpo train my_trainer.py                  one process, plain TRL (by itself, TRL 1.15 needs a GPU)
    async-grpo train my_trainer.py --distributed    a server that trains, and workers that generate

Change the parts marked CHANGE, one at a time. Every process calls get_trainer(): it must return the same each time.
"""

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

LETTERS = "abcdefgh"

# CHANGE: your dataset. `prompt` is what the model sees; other columns are arguments of the reward functions.
# datasets.load_dataset("json", data_files="questions.jsonl", split="train") reads a file.
ROWS = [{"prompt": letter, "wanted": letter} for letter in LETTERS * 20]


# CHANGE: your reward, a number for each completion. `wanted` is the dataset's column of that name.
def share_of_the_letter(completions: list[str], wanted: list[str], **_: object) -> list[float]:
    return [completion.count(letter) / 6 for completion, letter in zip(completions, wanted)]


# CHANGE: delete this function when you name a model in get_trainer().
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    vocabulary = {token: index for index, token in enumerate([*LETTERS, "<pad>", "<eos>"])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", padding_side="left")


# CHANGE: delete this function as well.
def tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
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
            max_position_embeddings=64,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def get_trainer() -> GRPOTrainer:
    tokenizer = tiny_tokenizer()
    return GRPOTrainer(
        model=tiny_model(tokenizer),  # CHANGE: model="Qwen/Qwen3-0.6B", or the path of a model
        processing_class=tokenizer,  # CHANGE: delete this line; TRL loads the tokenizer of the model that you name
        reward_funcs=[share_of_the_letter],
        train_dataset=Dataset.from_list(ROWS),
        # CHANGE: add eval_dataset=..., rows that are not trained on: a run then evaluates, and so does `evaluate`
        args=GRPOConfig(
            output_dir="outputs/first",  # CHANGE: the folder of the checkpoints
            max_steps=100,
            num_generations=8,  # completions of each prompt, compared with each other
            per_device_train_batch_size=64,  # completions in a step: 8 prompts of 8
            max_completion_length=6,  # CHANGE: the longest answer, in tokens
            learning_rate=3e-3,  # CHANGE: 1e-6 is usual for a pretrained model, 1e-5 with LoRA
            save_steps=50,
            logging_steps=1,
            report_to="none",  # CHANGE: "wandb" or "trackio" sends the curves there
            disable_tqdm=True,
            bf16=False,  # CHANGE: True on a GPU
            use_cpu=not torch.cuda.is_available(),
        ),
    )
