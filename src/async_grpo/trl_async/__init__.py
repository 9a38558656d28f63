"""Under TRL's asynchronous trainer, `trl.experimental.async_grpo`: its rollouts come from this queue.

TRL's trainer stays as it is and asks two objects: one for finished rollouts, one that takes its weights.
`rollout_worker` has both, `FileQueueRolloutWorker` and its `weights`. What they do is what a parameter server does with
its own trainer: `rollouts` issues jobs ahead and takes finished groups, `run` holds the run directory and the worker
processes, `samples` turns a group into TRL's rows, `config` reads TRL's configuration, and `on_cpu` lets TRL's trainer
run without a GPU. The workers are ordinary ones and know nothing of this.

Names of `trl.experimental.async_grpo` are in `samples`, `on_cpu` and `config` only;
tests/integration/test_trl_async_contract.py names what a new TRL has moved.
"""

from async_grpo.trl_async.rollout_worker import FileQueueRolloutWorker

__all__ = ["FileQueueRolloutWorker"]
