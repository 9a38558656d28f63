"""`PPOTrainer`: in plain TRL, the same with workers, and what a checkpoint brings back."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3ForTokenClassification

from async_grpo.credit import PPOConfig, PPOTrainer, TurnGRPOTrainer
from async_grpo.credit import critic as critics
from async_grpo.errors import UsageError
from async_grpo.settings import TrainingSettings
from async_grpo.setup.grpo_config.building import check_set, configurations_with
from async_grpo.training.before_start import refuse
from async_grpo.training.checkpoints import bytes_needed
from async_grpo.training.hyperparameters import hyperparameters
from kit.compared_with_trl import equal_weights, run_as_trl_would, settings
from kit.in_process import InProcessRun, training_logs
from kit.recorded_batches import replaying
from kit.scripted import ScriptedEngine
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_model, build_tokenizer, build_trainer, config, letters
from kit.tools import double
from kit.turns import Script, called, reply, says_eight

VERL = json.loads((Path(__file__).parents[1] / "unit" / "credit" / "verl_0_9_1.json").read_text())
KL_IN_REWARD = {"kl_in_reward": True, "beta": 0.05, "kl_ctrl": "adaptive", "target_kl": 0.001, "horizon": 20}


def ppo_trainer(tmp_path: Path, given: dict[str, Any] | None = None, **more: Any) -> Any:
    settled: dict[str, Any] = {"trainer_class": PPOTrainer, "config_class": PPOConfig, "num_generations": 1}
    settled |= {"critic_learning_rate": 1e-3, "gamma": 0.98, "lam": 0.9}
    return settings(tmp_path, given, **{**settled, **more})


# --- In plain TRL -----------------------------------------------------------------------------------------


def test_groups_of_one_are_trained_in_plain_trl(tmp_path: Path) -> None:
    trainer = ppo_trainer(tmp_path, max_steps=3, num_iterations=2)()
    assert (trainer.num_generations, trainer.args.generation_batch_size) == (1, 8)
    trainer.train()
    logs = training_logs(trainer)
    assert len(logs) == 3
    assert all("frac_reward_zero_std" not in entry for entry in logs)
    assert all(entry["grad_norm"] > 0.1 for entry in logs), "advantages of 0 would teach nothing"
    assert all(entry["critic/grad_norm"] > 0.1 for entry in logs)
    first, second, third = logs
    assert "critic/values/mean" in first and "critic/values/mean" not in second, "values are read once a batch"
    assert first["critic/advantages/mean"] == pytest.approx(0, abs=1e-6)
    assert first["response_length/mean"] == first["completions/mean_length"]
    assert first["critic/lr"] == 1e-3
    parts = [first[f"timing_s/{name}"] for name in ("gen", "values", "adv", "update_actor", "update_critic")]
    assert first["timing_s/step"] == pytest.approx(sum(parts))
    assert third["critic/vf_loss"] < second["critic/vf_loss"] * 10


def test_the_critic_learns_and_moves_nothing_of_the_policy(tmp_path: Path) -> None:
    frozen = ppo_trainer(tmp_path, max_steps=12, learning_rate=0.0, critic_learning_rate=1e-2)()
    before = copy.deepcopy(frozen.model.state_dict())
    frozen.train()
    assert equal_weights(frozen.model, before)
    losses = [entry["critic/vf_loss"] for entry in training_logs(frozen)]
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])


class Dealing(PPOTrainer):
    """Deals the micro-batches of a generation batch again, as a class that is put before `PPOTrainer` may."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        is_new = self._step % self.args.steps_per_generation == 0
        super()._prepare_inputs(generation_batch)
        if is_new:
            self._buffered_inputs = [dict(batch) for batch in reversed(self._buffered_inputs)]
            self.seen: list[tuple[int, int]] = getattr(self, "seen", [])
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.policys = id(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _train_critic(self, batch: Any) -> None:
        self.seen.append((self.policys, id(batch)))
        super()._train_critic(batch)


def test_the_critic_trains_on_the_micro_batches_of_the_policy(tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "max_steps": 2}
    trainer = ppo_trainer(tmp_path, trainer_class=Dealing, **changes)()
    trainer.train()
    assert len(trainer.seen) == 8 and all(policys == critics_ for policys, critics_ in trainer.seen)


def test_values_are_read_before_their_token_and_do_not_depend_on_padding(tmp_path: Path) -> None:
    module = critics.made_for(build_model(build_tokenizer()), None, None, seed=0)
    critic = critics.Critic(module, build_trainer(tmp_path).accelerator, learning_rate=1.0, max_grad_norm=1.0)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    right = module.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 1:4, 0]

    def batch(padding: int, last: int = 9) -> dict[str, Tensor]:
        prompt = torch.tensor([[0] * padding + [5, 6]])
        completion = torch.tensor([[7, 8, last]])
        masks = {"prompt_mask": torch.tensor([[0] * padding + [1, 1]]), "completion_mask": torch.ones_like(completion)}
        return {"prompt_ids": prompt, "completion_ids": completion, **masks}

    for given in (batch(0), batch(3), batch(0, last=20)):
        assert torch.allclose(critic.old_values(given, rows=1)[0], right, atol=1e-5)


def test_a_critic_begins_as_the_policy_with_a_head_of_the_seed(tmp_path: Path) -> None:
    policy = build_model(build_tokenizer(), attention_dropout=0.3)
    drawn = torch.random.get_rng_state()
    one, other, third = (critics.made_for(policy, None, None, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), drawn), "the policy's random numbers are as without a critic"
    assert torch.equal(one.score.weight, other.score.weight) and not torch.equal(one.score.weight, third.score.weight)
    assert equal_weights(one.base_model, policy.base_model)
    assert one.config.attention_dropout == one.dropout.p == 0.0 and policy.config.attention_dropout == 0.3
    policy.save_pretrained(tmp_path)
    assert equal_weights(critics.made_for(policy, str(tmp_path), None, seed=1).base_model, policy.base_model)
    assert critics.parameters_of(policy, None, None, None) == sum(it.numel() for it in one.parameters())


def test_rows_without_a_reward_are_left_out(tmp_path: Path) -> None:
    def some(completions: list[Any], **_: Any) -> list[float | None]:
        return [None if index % 4 == 1 else score for index, score in enumerate(letters(completions))]

    run = InProcessRun(ppo_trainer(tmp_path, max_steps=1, reward_funcs=some)).train()
    rewards = torch.cat([torch.from_numpy(group.rewards) for group in run.groups])[:, 0]
    batch = run.inputs[0]
    assert batch["value_mask"].any(dim=1).tolist() == (~rewards.isnan()).tolist()
    assert not batch["advantages"][rewards.isnan()].any()
    known = batch["advantages"][batch["value_mask"].bool()]
    assert known.mean() == pytest.approx(0, abs=1e-6) and known.std() == pytest.approx(1, abs=1e-4)


def test_turns_of_a_dialogue(tmp_path: Path) -> None:
    """With tools: their tokens have no advantage, and the rewards of turns are where the turns end."""
    get_trainer = ppo_trainer(
        tmp_path,
        {"tools": [double], "turn_reward_funcs": [called]},
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[says_eight],
        max_completion_length=256,
        num_generations=4,
        max_steps=1,
        mask_truncated_completions=True,
        critic_learning_rate=1e-9,
    )
    run = InProcessRun(get_trainer, engine=ScriptedEngine(Script(reply))).train()
    batch = run.inputs[0]
    written = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert torch.equal(batch["value_mask"].bool(), written)
    assert not batch["advantages"][~written].any() and batch["advantages"][written].all()
    lost = ~written.any(dim=1)
    assert 0 < lost.sum() < len(lost), "a completion without an end counts for nothing"
    values, returns = batch["values"], batch["returns"]
    with_call = next(row for row in range(8) if not lost[row] and not batch["tool_mask"][row].all())
    indices = written[with_call].nonzero()[:, 0].tolist()
    ends = [at for at, after in zip(indices, [*indices[1:], None], strict=True) if after != at + 1]
    assert len(ends) == 2
    right: dict[int, float] = {}
    value, advantage = 0.0, 0.0
    for at in reversed(indices):  # the recursion once more, with the rewards at the ends
        reward = {ends[0]: 0.2, ends[1]: 0.0}.get(at, 0.0)
        error = reward + 0.98 * value - float(values[with_call, at])
        advantage = error + 0.98 * 0.9 * advantage
        value = float(values[with_call, at])
        right[at] = advantage + value
    assert [float(returns[with_call, at]) for at in indices] == pytest.approx([right[at] for at in indices], abs=1e-5)
    assert run.logs[0]["reward/turn"] > 0


@pytest.mark.parametrize("kl_penalty", ["kl", "abs", "mse", "low_var_kl"])
def test_kl_in_the_reward(tmp_path: Path, kl_penalty: str, model_folder: str) -> None:
    changes = {"model": model_folder, "learning_rate": 1e-2, "max_steps": 3, **KL_IN_REWARD, "kl_penalty": kl_penalty}
    trainer = ppo_trainer(tmp_path, **changes)()
    trainer.train()
    logs = training_logs(trainer)
    assert "kl" not in logs[0], "the loss has none"
    assert logs[0]["actor/reward_kl"] == pytest.approx(0, abs=1e-6)
    assert logs[0]["critic/rewards/mean"] == pytest.approx(logs[0]["critic/score/mean"], abs=1e-5)
    assert logs[0]["actor/kl_coef"] == 0.05
    assert logs[1]["actor/kl_coef"] == pytest.approx(0.05 * (1 - 0.2 * 8 / 20)), "KL was under its target"
    assert logs[2]["critic/rewards/mean"] != pytest.approx(logs[2]["critic/score/mean"], abs=1e-5)
    if kl_penalty != "kl":  # which may be negative
        assert logs[2]["actor/reward_kl"] > 0.001
        assert logs[2]["critic/rewards/mean"] < logs[2]["critic/score/mean"], "KL costs reward"
        assert trainer.kl_coef == pytest.approx(logs[2]["actor/kl_coef"] * (1 + 0.2 * 8 / 20))


# --- With workers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_generations": 2, "beta": 0.1},
        KL_IN_REWARD,
        {"num_iterations": 2, "max_steps": 4},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"loss_type": "grpo", "mask_truncated_completions": True},
    ],
    ids=str,
)
def test_workers_give_what_plain_trl_gives(tmp_path: Path, changes: dict[str, Any], model_folder: str) -> None:
    run, plain = run_as_trl_would(ppo_trainer(tmp_path, model=model_folder, **changes))
    pairs = zip(run.trainer.critic.model.parameters(), plain.critic.model.parameters(), strict=True)
    assert all(torch.allclose(ours, theirs, rtol=0, atol=1e-5) for ours, theirs in pairs)


def test_a_worker_makes_no_critic(tmp_path: Path) -> None:
    run = InProcessRun(ppo_trainer(tmp_path, max_steps=1)).train()
    assert run.worker._critic is None and run.trainer._critic is not None
    assert not any("values" in group.extra_columns or "values" in group.metrics for group in run.groups)


def test_stale_groups_are_corrected_after_whitening(tmp_path: Path) -> None:
    run = InProcessRun(ppo_trainer(tmp_path, max_steps=3, learning_rate=1e-2), fresh_every=3).train()
    assert [entry["async/staleness_max"] for entry in run.logs] == [0, 1, 2]
    for batch in run.inputs:
        known = batch["advantages"][batch["value_mask"].bool()]
        assert known.mean() == pytest.approx(0, abs=1e-5) and known.std() == pytest.approx(1, abs=1e-4)


# --- Checkpoints ------------------------------------------------------------------------------------------


def test_a_resumed_training_is_as_one_that_was_never_stopped(tmp_path: Path, model_folder: str) -> None:
    """In plain TRL, on the completions of another run: TRL itself samples others after a resume."""
    changes = {**KL_IN_REWARD, "max_steps": 4, "learning_rate": 1e-2, "per_device_train_batch_size": 3}  # in one epoch
    get_trainer = ppo_trainer(tmp_path, model=model_folder, **changes)
    batches = InProcessRun(get_trainer).train().batches
    saved = {"save_strategy": "steps", "save_steps": 2}
    whole = get_trainer({"rollout_func": replaying(iter(batches))}, **saved)
    whole.train()
    resumed = get_trainer({"rollout_func": replaying(iter(batches[2:]))}, **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert equal_weights(whole.critic.model, resumed.critic.model) and equal_weights(whole.model, resumed.model)
    assert resumed.kl_coef == whole.kl_coef != 0.05
    assert training_logs(resumed)[-1]["actor/kl_coef"] == training_logs(whole)[-1]["actor/kl_coef"]


def test_a_resume_has_the_learning_rate_of_its_start(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 1}
    ppo_trainer(tmp_path, max_steps=1, **changes)().train()
    resumed = ppo_trainer(tmp_path, max_steps=2, critic_learning_rate=0.5, **changes)()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert training_logs(resumed)[-1]["critic/lr"] == 0.5


def test_a_checkpoint_without_a_critic_is_refused(tmp_path: Path) -> None:
    build_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    with pytest.raises(ValueError, match="checkpoint-1 has no critic: another trainer wrote it"):
        ppo_trainer(tmp_path)().train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# --- What is refused --------------------------------------------------------------------------------------


class Values(nn.Module):
    """A critic of the user's, of so many numbers a token."""

    def __init__(self, numbers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, numbers)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return type("Output", (), {"logits": self.embedding(input_ids)})


def test_a_critic_of_the_users(tmp_path: Path) -> None:
    module = Values()
    before = module.embedding.weight.clone()
    ppo_trainer(tmp_path, {"critic": module})().train()
    assert not torch.equal(module.embedding.weight, before)


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ({"credit": "turn"}, {}, "credit is of advantages that compare the completions of a group"),
        ({"critic": Values(2)}, {}, r"logits of the shape \[B, T, 1\], one number a token, got \[1, 2, 2\]"),
        ({"critic": Values()}, {"critic_model": "x"}, "critic_model of the PPOConfig names a critic, and critic="),
        ({}, {"per_device_train_batch_size": 1}, "one completion has no spread"),
        ({}, {"gamma": 1.5}, "gamma must be from 0 to 1, got 1.5"),
        ({}, {"delta": 1.2}, r"delta must be over 1 \+ epsilon_high, which is 1.2, got 1.2"),
        ({}, {"kl_penalty": "full"}, "kl_penalty must be one of kl, abs, mse, low_var_kl, got 'full'"),
        ({}, {"kl_ctrl": "adaptive"}, "kl_ctrl must be fixed without kl_in_reward=True"),
        ({}, {"kl_in_reward": True}, "beta must not be 0 with kl_in_reward=True"),
        ({}, {"num_generations": 3}, r"generation_batch_size \(8\) must be divisible by num_generations"),
    ],
    ids=str,
)
def test_what_ppo_refuses(tmp_path: Path, given: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ppo_trainer(tmp_path, given, **changes)()


def test_deepspeed_is_refused_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get_trainer = ppo_trainer(tmp_path)
    init = TurnGRPOTrainer.__init__

    def sharded(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.is_deepspeed_enabled = True

    monkeypatch.setattr(TurnGRPOTrainer, "__init__", sharded)
    with pytest.raises(ValueError, match=r"one engine for one model, and PPO trains two. Take FSDP2"):
        get_trainer()


def test_filtering_groups_of_equal_rewards_is_refused(tmp_path: Path) -> None:
    trainer = ppo_trainer(tmp_path)()
    refuse(trainer, TrainingSettings(), None)
    with pytest.raises(UsageError, match="PPOTrainer learns from equal rewards too"):
        refuse(trainer, TrainingSettings(filter_zero_variance=True), None)


def test_what_a_run_says_and_counts_of_a_critic(tmp_path: Path) -> None:
    trainer, plain = ppo_trainer(tmp_path)(), build_trainer(tmp_path)
    critic = trainer.trained_besides()
    assert critic > 10_000
    assert bytes_needed(trainer) - bytes_needed(plain) == 12 * critic
    assert hyperparameters(trainer, TrainingSettings())["advantages"] == "critic"
    assert "advantages" not in hyperparameters(plain, TrainingSettings())


def test_set_reaches_the_fields_of_a_critic(tmp_path: Path) -> None:
    texts = {"lam": ".95", "per_device_train_batch_size": "4", "critic_model": "none"}
    with configurations_with(texts) as made:
        trainer = ppo_trainer(tmp_path)()
    check_set(trainer, texts, made)
    args = trainer.args
    assert (args.lam, args.num_generations, args.generation_batch_size) == (0.95, 1, 4)
    with configurations_with({"num_generations": "2"}):
        assert ppo_trainer(tmp_path)().args.num_generations == 2


def test_a_configuration_without_a_critic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"configured by args=PPOConfig\(...\), got a GRPOConfig"):
        build_trainer(tmp_path, trainer_class=PPOTrainer)


def test_a_critic_of_other_texts_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    config = build_model(tokenizer, max_position_embeddings=64, num_labels=1).config
    Qwen3ForTokenClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="reads 64 tokens, and the policy 2048"):
        ppo_trainer(tmp_path, critic_model=str(tmp_path))()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has another tokenizer than the policy"):
        ppo_trainer(tmp_path, critic_model=str(tmp_path))()


@pytest.mark.parametrize("steps", [{"generation_batch_size": 16}, {"steps_per_generation": 4}, {}], ids=str)
def test_groups_of_one_fit_every_batch(tmp_path: Path, steps: dict[str, int]) -> None:
    made = config(tmp_path, PPOConfig, num_generations=1, do_eval=True, eval_strategy="steps", eval_steps=1, **steps)
    assert (made.num_generations, made.num_generations_eval) == (1, None)


# --- TRL's loss -------------------------------------------------------------------------------------------


MODES = {"dapo": "token-mean", "bnpo": "token-mean", "grpo": "seq-mean-token-mean", "luspo": "seq-mean-token-sum"}
MODES["dr_grpo"] = "seq-mean-token-sum-norm"


@pytest.mark.parametrize(("loss_type", "mode"), MODES.items())
def test_the_losses_of_trl_are_verls(loss_type: str, mode: str, tmp_path: Path) -> None:
    """Compare one micro-batch, with the dual clip, which is TRL's `delta`."""
    given = {name: torch.tensor(rows) for name, rows in VERL["inputs"].items()}
    mask = given["mask"]
    trainer: Any = build_trainer(tmp_path, loss_type=loss_type, delta=3.0, epsilon_high=0.28, max_completion_length=12)
    trainer.current_gradient_accumulation_steps = 1
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (given["logprobs"], torch.zeros(4, 12), None)
    batch = {
        "prompt_ids": torch.ones(4, 1, dtype=torch.long),
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": torch.ones(4, 12, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor(VERL["advantages"]),
        "old_per_token_logps": given["old_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    ratio = torch.exp(given["logprobs"] - given["old_logprobs"])[mask.bool()]
    assert (ratio > 3).any() and (ratio < 0.8).any(), "all kinds of clipping must be seen"
    assert float(trainer._compute_loss(trainer.model, batch)) == pytest.approx(VERL["policy_loss"][mode], abs=1e-6)
