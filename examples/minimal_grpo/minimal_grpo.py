"""GRPO in one file: plain torch, no trainer. docs/minimal_grpo.md explains it line by line.

The task: say the letter of the prompt again, six times. The model starts from random weights; the only thing that it is
ever told is the reward. A test holds that TRL's `GRPOTrainer` computes the same losses from the same completions.

    python examples/minimal_grpo/minimal_grpo.py --steps 100

Letters after names are shapes: B completions, P prompt tokens, T completion tokens, V words of the vocabulary.
"""

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

LETTERS = "abcdefgh"  # a letter's token id is its index
EOS = len(LETTERS)  # ends a completion
PAD = EOS + 1  # padding after the end token

PROMPTS = 8  # prompts a batch
GROUP = 8  # completions a prompt: they are compared with each other
LONGEST = 6  # completion tokens
UPDATES = 2  # optimizer steps a batch
CLIP = 0.2  # how far a token's probability may move in one batch
BETA = 0.01  # weight of staying close to the first policy
LEARNING_RATE = 3e-3
ADAM_EPSILON = 1e-5  # with the usual 1e-8, Adam's first step makes a full step of a gradient's rounding error


@dataclass(frozen=True, slots=True)
class Batch:
    """What was sampled, and how good it was."""

    prompts_BP: Tensor
    completions_BT: Tensor
    mask_BT: Tensor  # 1 up to and including the end token, 0 after it
    old_logps_BT: Tensor  # of the policy that sampled
    reference_logps_BT: Tensor  # of the policy before training
    rewards_B: Tensor


def build_model() -> PreTrainedModel:
    """A random transformer of about 20,000 parameters. Any causal language model would do."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": PAD + 1, "eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None}
    return Qwen3ForCausalLM(Qwen3Config(**shape, **tokens, num_key_value_heads=2, head_dim=16))


def reward(letter: str, completion: str) -> float:
    """The share of the six positions where the completion says the prompt's letter."""
    return completion.count(letter) / LONGEST


def text(tokens: Tensor) -> str:
    return "".join(LETTERS[token] for token in tokens.tolist() if token < EOS)


@torch.no_grad()
def sample(model: PreTrainedModel, prompts_BP: Tensor) -> tuple[Tensor, Tensor]:
    """Completions [B, T], drawn token by token at temperature 1, and their mask."""
    tokens, mask = prompts_BP, []
    running_B = torch.ones(len(prompts_BP), dtype=torch.bool)
    for _ in range(LONGEST):
        logits_BV = model(tokens).logits[:, -1]
        drawn_B = torch.multinomial(logits_BV.softmax(-1), 1)[:, 0]
        tokens = torch.cat([tokens, drawn_B.where(running_B, PAD)[:, None]], dim=1)
        mask.append(running_B)
        running_B = running_B & (drawn_B != EOS)
    return tokens[:, prompts_BP.shape[1] :], torch.stack(mask, dim=1).float()


def log_probabilities(model: PreTrainedModel, prompts_BP: Tensor, completions_BT: Tensor) -> Tensor:
    """Log-probabilities of the completion tokens, given the prompt and the tokens before it: [B, T]."""
    logits = model(torch.cat([prompts_BP, completions_BT], dim=1)).logits
    logits_BTV = logits[:, prompts_BP.shape[1] - 1 : -1]  # the logits before a token are those that predict it
    return logits_BTV.log_softmax(-1).gather(2, completions_BT[:, :, None])[:, :, 0]


def roll_out(model: PreTrainedModel, reference: PreTrainedModel) -> Batch:
    """Draw prompts, complete each several times, and score the completions."""
    drawn = torch.randint(len(LETTERS), (PROMPTS,))
    prompts_BP = drawn.repeat_interleave(GROUP)[:, None]
    completions_BT, mask_BT = sample(model, prompts_BP)
    pairs = zip(prompts_BP, completions_BT, strict=True)
    with torch.no_grad():
        return Batch(
            prompts_BP,
            completions_BT,
            mask_BT,
            old_logps_BT=log_probabilities(model, prompts_BP, completions_BT),
            reference_logps_BT=log_probabilities(reference, prompts_BP, completions_BT),
            rewards_B=torch.tensor([reward(text(prompt), text(completion)) for prompt, completion in pairs]),
        )


def group_advantages(rewards_B: Tensor) -> Tensor:
    """How much better a completion is than the others of its prompt, in standard deviations: [B]."""
    groups = rewards_B.view(-1, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def grpo_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The clipped policy gradient of PPO with the group's advantages, and a pull towards the reference."""
    logps_BT = log_probabilities(model, batch.prompts_BP, batch.completions_BT)
    advantages_B1 = group_advantages(batch.rewards_B)[:, None]
    ratio_BT = (logps_BT - batch.old_logps_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - CLIP, 1 + CLIP)
    gain_BT = torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
    towards_BT = batch.reference_logps_BT - logps_BT
    divergence_BT = ratio_BT * (towards_BT.exp() - towards_BT - 1)
    loss_BT = BETA * divergence_BT - gain_BT
    return (loss_BT * batch.mask_BT).sum() / batch.mask_BT.sum()


def train(model: PreTrainedModel, steps: int) -> Iterator[tuple[Batch, float]]:
    """Train for `steps` optimizer steps; yields the batch and the loss of each."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPSILON, weight_decay=0)
    for step in range(steps):
        if step % UPDATES == 0:
            batch = roll_out(model, reference)
        loss = grpo_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield batch, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on one page.")
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    for step, (batch, loss) in enumerate(train(build_model(), steps), start=1):
        example = f"{text(batch.prompts_BP[0])} → {text(batch.completions_BT[0])}"
        print(f"step {step:>3}/{steps}  reward {batch.rewards_B.mean():.3f}  loss {loss:+.4f}  {example}")


if __name__ == "__main__":
    main()
