"""What TRL's asynchronous trainer asks of a rollout worker and of a weight transfer, checked against the installed TRL.

A failure names what moved and the module of ours that must follow. `make test-trl-next` runs this with the next TRL.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import queue
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from in_process import build_model, build_tokenizer
from transformers import TrainingArguments
from trl import GRPOConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer as trl_trainer
from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.trainer.base_config import _BaseConfig
from trl_contract import moved

from async_grpo.cli import main
from async_grpo.errors import PeerDiedError, SetupFileError, UsageError
from async_grpo.queue import WorkerQueue
from async_grpo.records import Job, RolloutGroup
from async_grpo.rundir.reading import read_object
from async_grpo.trl_async import FileQueueRolloutWorker
from async_grpo.trl_async.config import NOT_KEPT, SAMPLING, refuse
from async_grpo.trl_async.on_cpu import TorchAttention, let_trl_train_without_a_gpu
from async_grpo.trl_async.rollout_worker import RolloutBuffer, RunWeights
from async_grpo.trl_async.samples import samples_of
from async_grpo_ipc import SharedWeightTransfer, open_remote_memory

pytestmark = pytest.mark.integration

OURS = "async_grpo.trl_async"
LETTERS = "abcd"

LOOKED_AT = {  # fields of AsyncGRPOConfig that are the trainer's own, or that ours reads
    *("model_init_kwargs", "dtype", "trust_remote_code", "router_aux_loss_coef", "epsilon", "epsilon_high"),
    *("learning_rate", "logging_steps", "lr_scheduler_type", "ignore_data_skip"),
    *("num_generations", "token_budget", "max_staleness", "weight_sync_steps", "heartbeat_stale_after_s"),
    *("weight_sync_timeout", "max_inflight_tasks"),
}


def setup_file(folder: Path) -> Path:
    path = folder / "setup.py"
    path.write_text("def get_trainer(): ...")
    return path


def configured(folder: Path, **changes: Any) -> AsyncGRPOConfig:
    settings = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_steps": 2,
        "token_budget": 0,
        "learning_rate": 0.05,
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return AsyncGRPOConfig(str(folder / "output"), **{**settings, **changes})


def group(seq: int, logprobs: np.ndarray | None = None, prompts: int = 1) -> RolloutGroup:
    """Two completions of three tokens and of two, of a prompt of two; or of two prompts, of two and one."""
    drawn = np.random.default_rng(seq)
    job = Job(run_id="r", seq=seq, row={"prompt": "ab"}, num_generations=2, seed=0, born_version=1, min_version=1)
    return RolloutGroup(
        job=job,
        attempt=0,
        worker="dev1",
        policy_version=1,
        reward_names=("right", "short"),
        metrics={"tools/call_frequency": [1.0, 3.0]},
        prompt_ids=drawn.integers(10, 60, 2 if prompts == 1 else 3).astype(np.int32),
        prompt_lengths=None if prompts == 1 else np.array([2, 1], np.int32),
        completion_lengths=np.array([3, 2], np.int32),
        completion_ids=drawn.integers(10, 60, 5).astype(np.int32),
        sampling_logprobs=np.linspace(-1, -3, 5, dtype=np.float32) if logprobs is None else logprobs,
        tool_mask=np.array([1, 0, 1, 1, 1], np.uint8),
        rewards=np.array([[1, 0.5], [0, np.nan]], np.float32),
        completions=["abc", "de"],
    )


def test_ours_have_what_the_protocols_ask_for(tmp_path: Path) -> None:
    asked = {
        trl_trainer.RolloutWorkerProtocol: FileQueueRolloutWorker,
        trl_trainer.WeightTransferProtocol: RunWeights,
    }
    for protocol, ours in asked.items():
        for name, method in inspect.getmembers(protocol, inspect.isfunction):
            if name.startswith("__") or name == "_no_init_or_replace_init":
                continue
            want, have = (list(inspect.signature(one).parameters) for one in (method, getattr(ours, name)))
            assert want == have, moved(f"{protocol.__name__}.{name}", f"takes {want}", OURS)
    attributes = set(trl_trainer.RolloutWorkerProtocol.__annotations__)
    assert attributes == {"rollout_buffer", "metrics_queue"}, moved("RolloutWorkerProtocol", f"has {attributes}", OURS)
    worker = FileQueueRolloutWorker(
        setup_file(tmp_path), configured(tmp_path), [{"prompt": "a"}], run_dir=tmp_path / "r"
    )
    assert all(hasattr(worker, name) for name in attributes)


def test_a_row_has_the_fields_of_trls_sample() -> None:
    fields = [field.name for field in dataclasses.fields(trl_worker.RolloutSample)]
    (first, _) = samples_of(group(0))
    assert all(getattr(first, name) is not None for name in fields), moved("RolloutSample", f"has {fields}", OURS)


def test_every_field_of_the_configuration_was_looked_at() -> None:
    ours = {field.name for field in dataclasses.fields(AsyncGRPOConfig)}
    bases = {field.name for base in (TrainingArguments, _BaseConfig) for field in dataclasses.fields(base)}
    known = LOOKED_AT | set(SAMPLING) | set(NOT_KEPT)
    assert ours - bases - known == set(), moved("AsyncGRPOConfig", "has a new field", f"{OURS}.config")
    assert known - ours == set(), moved("AsyncGRPOConfig", "has lost a field", f"{OURS}.config")
    for_workers = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert set(SAMPLING) <= for_workers, moved("GRPOConfig", "has lost a field", f"{OURS}.config")


def test_advantages_and_metrics_are_those_of_trls_own_worker() -> None:
    mine = group(0)
    loop = SimpleNamespace(
        reward_funcs=[lambda column=column, **_: mine.rewards[:, column].tolist() for column in (0, 1)],
        reward_func_names=list(mine.reward_names),
        _env_reward_types=[],
        _provides_rollout_reward=False,
    )
    scored = SimpleNamespace(
        prompts=[[], []],
        completions=[[], []],
        completions_ids=[[], []],
        completions_sequences=[[SimpleNamespace(input_ids=[], completion_mask=[], old_log_probs=[])]] * 2,
        reward_kwargs={},
        tool_call_counts=[0, 0],
        tool_failure_counts=[0, 0],
        model_version=1,
        group_id=0,
        env_rewards=[],
        rollout_rewards=[],
    )
    theirs = asyncio.run(trl_worker._AsyncRolloutLoop._score_group(loop, scored))
    for sample, trls in zip(samples_of(mine), theirs, strict=True):
        assert sample.advantage == pytest.approx(trls.advantage)
        assert {name: sample.metrics[name] for name in trls.metrics} == pytest.approx(trls.metrics, nan_ok=True)
        assert sample.metrics["tools/call_frequency"] == 2.0


def test_prompts_of_their_own_and_masks_reach_the_rows() -> None:
    mine = group(0, prompts=2)
    first, second = samples_of(mine)
    assert first.input_ids.tolist() == [*mine.prompt_ids[:2], *mine.completion_ids[:3]]
    assert second.input_ids.tolist() == [*mine.prompt_ids[2:], *mine.completion_ids[3:]]
    assert first.completion_mask.tolist() == [0, 0, 1, 0, 1] and second.completion_mask.tolist() == [0, 1, 1]
    assert first.old_log_probs.tolist()[2:] == pytest.approx([-1, -1.5, -2])


def exact(model: Any, made: RolloutGroup) -> RolloutGroup:
    """The group with the log-probabilities that the model gives to its tokens, each completion by itself."""
    logprobs = []
    for sample in samples_of(made):
        ids = torch.from_numpy(sample.input_ids)[None]
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        logprobs += log_probs[-int(len(sample.input_ids) - 2) :].tolist()
    return group(made.job.seq, np.array(logprobs, np.float32))


def test_trls_trainer_trains_on_the_rows_and_its_weights_are_published(tmp_path: Path) -> None:
    """Two steps on a CPU. At the first the ratio is 1: attention does not reach beyond a completion's own row."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    model = build_model(tokenizer)  # as the trainer's before its first step
    model.save_pretrained(tmp_path / "model")
    let_trl_train_without_a_gpu()
    numbers = count()
    worker = SimpleNamespace(
        start=lambda: None,
        stop=lambda: None,
        update_model_version=lambda version: None,
        check_health=lambda stale_after_s: None,
        metrics_queue=queue.Queue(),
        rollout_buffer=RolloutBuffer(lambda: samples_of(exact(model, group(next(numbers))))),
    )
    transfer = SharedWeightTransfer(None, tmp_path / "handle.json", slots=3)
    trainer = AsyncGRPOTrainer(
        str(tmp_path / "model"),
        args=configured(tmp_path),
        train_dataset=Dataset.from_dict({"prompt": ["ab"]}),
        rollout_worker=worker,
        weight_transfer=transfer,
    )
    published: list[int] = []
    real = transfer.resume

    def resume() -> None:
        real()
        with open_remote_memory(tmp_path / "handle.json") as remote, remote.lease() as view:
            published.append(view.version)
            for name, parameter in trainer.model.named_parameters():
                assert torch.equal(view[name], parameter), name

    transfer.resume = resume  # type: ignore[method-assign]
    trainer.train()
    refuse(trainer.args)  # what TRL has written into its configuration is not refused the next time
    assert published == [1, 2, 3]
    first, second = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert first["ratio"] == pytest.approx(1, abs=1e-4) and abs(first["kl"]) < 1e-4
    assert abs(second["ratio"] - 1) > 1e-4, "the second batch was fetched before the first step: its weights are older"
    assert first["sample/staleness_max"] == 0 and first["rewards/right"] == 0.5


def test_groups_reach_trl_once_and_the_run_says_how_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "ab"}, {"prompt": "cd"}]
    rollouts = FileQueueRolloutWorker(
        setup_file(tmp_path), configured(tmp_path), rows, workers=0, run_dir=tmp_path / "run"
    )
    for version in (1, 2):
        if version == 1:
            rollouts.weights.init_weight_transfer()
        rollouts.weights.send_weights(iter([("w", torch.full((2,), version))]))
        rollouts.update_model_version(version)
        if version == 1:
            rollouts.start()
        with closing(WorkerQueue.open(rollouts.run_dir, None, "cpu")) as worker:
            for claim in worker.claim(2):
                worker.complete(claim, dataclasses.replace(group(claim.job.seq), job=claim.job))
            got = [rollouts.rollout_buffer.get() for _ in range(4)]
        assert [row.group_id for row in got] == [2 * version - 2] * 2 + [2 * version - 1] * 2
        assert [row.prompt[0]["content"] for row in got] == ["ab", "ab", "cd", "cd"]
    with pytest.raises(PeerDiedError, match=r"For 0 s .* no worker .* async-grpo worker --run-dir"):
        rollouts.check_health(0.0)
    with pytest.raises(UsageError, match="serves one training"):
        rollouts.weights.init_weight_transfer()
    with pytest.raises(KeyboardInterrupt):
        try:
            raise KeyboardInterrupt
        finally:
            rollouts.stop()  # as TRL does
            rollouts.weights.destroy()
    summary = read_object(rollouts.run_dir / "summary.json")
    assert (summary["state"], summary["rollouts"], summary["staleness_max"]) == ("stopped", 8, 1)
    used = [json.loads(line) for line in (rollouts.run_dir / "consumed.jsonl").read_text().splitlines()[1:]]
    assert [entry["seqs"] for entry in used] == [[0, 1], [2, 3]]
    assert main(["status", str(rollouts.run_dir)]) == 0
    assert "1 steps in" in (shown := capsys.readouterr().out) and "8 rollouts" in shown


def test_attention_in_torch_is_that_of_each_path() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(5, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    ends = torch.tensor([0, 2, 5]), torch.tensor([0, 2, 7])  # the second segment sees two tokens before its own three
    given = {"softmax_scale": None, "causal": True}
    out = TorchAttention.flash_attn_varlen_func(query, key, value, *ends, 3, 5, window_size=(-1, -1), **given)
    near = TorchAttention.flash_attn_varlen_func(query, key, value, *ends, 3, 5, window_size=(1, 0), **given)
    for rows, path, offset in ((slice(0, 2), slice(0, 2), 0), (slice(2, 5), slice(2, 7), 2)):
        q, k, v = (
            query[rows].transpose(0, 1),
            *(kv[path].repeat_interleave(2, 1).transpose(0, 1) for kv in (key, value)),
        )
        sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(offset)
        for mask, found in ((sees, out), (sees & sees.new_ones(sees.shape).triu(offset - 1), near)):
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            assert torch.allclose(found[rows].transpose(0, 1), expected, atol=1e-6)


def test_what_is_used_wrongly_is_a_sentence(tmp_path: Path) -> None:
    args = configured(tmp_path)
    with pytest.raises(SetupFileError, match="lambda"):
        FileQueueRolloutWorker(lambda: None, args, [])
    worker = FileQueueRolloutWorker(setup_file(tmp_path), args, [{"prompt": "a"}], workers=0, run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match=r"weight_transfer=rollouts.weights"):
        worker.start()
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="workers must be 0 or more"):
        FileQueueRolloutWorker(setup_file(tmp_path), args, [], workers=-1)
