"""The one-file GRPO of examples/minimal_grpo computes what TRL computes, and its page shows what the file has."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from async_grpo.setup.trl_compat import repair_trl
from kit.scripts import module_at

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "minimal_grpo" / "minimal_grpo.py"
PAGE = ROOT / "docs" / "minimal_grpo.md"
STEPS = 8


@pytest.fixture
def minimal() -> ModuleType:
    return module_at(FILE)


def tokenizer_of(minimal: ModuleType) -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate([*minimal.LETTERS, "<eos>", "<pad>"])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def trl_losses(minimal: ModuleType, model: Path, batches: list[Any], folder: Path) -> tuple[list[float], GRPOTrainer]:
    """Train TRL's trainer on the recorded completions, given to it by its public `rollout_func`."""
    recorded = iter(batches)
    losses = []

    class Recording(GRPOTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        batch = next(recorded)
        assert prompts == [minimal.text(prompt) for prompt in batch.prompts_BP]
        lengths = batch.mask_BT.sum(1).long().tolist()
        rows = zip(batch.completions_BT.tolist(), batch.old_logps_BT.tolist(), lengths, strict=True)
        completions, logprobs = zip(*[(tokens[:end], logps[:end]) for tokens, logps, end in rows], strict=True)
        prompt_ids = batch.prompts_BP.tolist()
        return {"prompt_ids": prompt_ids, "completion_ids": list(completions), "logprobs": list(logprobs)}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [minimal.reward(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]

    prompts = [minimal.text(prompt) for batch in batches for prompt in batch.prompts_BP[:: minimal.GROUP]]
    trainer = Recording(
        model=str(model),
        processing_class=tokenizer_of(minimal),
        reward_funcs=[reward],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        rollout_func=rollout_func,
        args=GRPOConfig(
            output_dir=str(folder),
            max_steps=STEPS,
            model_init_kwargs={"dtype": "float32"},
            shuffle_dataset=False,
            per_device_train_batch_size=minimal.PROMPTS * minimal.GROUP,
            num_generations=minimal.GROUP,
            num_iterations=minimal.UPDATES,
            max_completion_length=minimal.LONGEST,
            loss_type="dapo",  # TRL's default: every token counts the same
            epsilon=minimal.CLIP,
            beta=minimal.BETA,
            learning_rate=minimal.LEARNING_RATE,
            adam_epsilon=minimal.ADAM_EPSILON,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    repair_trl()
    trainer.train()
    assert next(recorded, None) is None
    return losses, trainer


@pytest.mark.integration
def test_the_losses_and_the_weights_are_those_of_trl(minimal: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = minimal.build_model()
    untrained = copy.deepcopy(model)
    untrained.save_pretrained(tmp_path / "model")  # TRL loads the reference model by name
    batches, losses = [], []
    for step, (batch, loss) in enumerate(minimal.train(model, STEPS)):
        losses.append(loss)
        if step % minimal.UPDATES == 0:
            batches.append(batch)

    of_trl, trainer = trl_losses(minimal, tmp_path / "model", batches, tmp_path)

    assert_close(losses, of_trl, rtol=0, atol=1e-6)
    moved = (model.lm_head.weight - untrained.lm_head.weight).detach().abs().max().item()
    assert moved > 1e-2, "the comparison must see training"
    for ours, theirs in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_page_explains_every_line_of_the_file() -> None:
    """The code blocks of the page, one after another, are the file from its constants to its end."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    shown = [line for block in blocks for line in block.splitlines() if line.strip()]
    code = FILE.read_text()
    code = code[code.index("LETTERS = ") : code.index("def main()")]
    assert shown == [line for line in code.splitlines() if line.strip()]
