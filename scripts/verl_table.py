"""Writes tests/unit/credit/verl_0_9_1.json: numbers of verl's formulas on fixed inputs, for the tests of ours.

Two files of verl's wheel are executed, `verl/trainer/ppo/core_algos.py` and `verl/utils/torch_functional.py`. What they
import besides torch and numpy is replaced by empty classes, because none of it is called here.

    pip download --no-deps verl==0.9.1
    python scripts/verl_table.py verl-0.9.1-py3-none-any.whl
"""

import json
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

TABLE = Path(__file__).parent.parent / "tests" / "unit" / "credit" / "verl_0_9_1.json"
ABSENT = {
    "omegaconf": ["DictConfig"],
    "tensordict": ["TensorDict"],
    "transformers": ["PreTrainedTokenizer"],
    "verl": [],
    "verl.trainer": [],
    "verl.trainer.config": ["AlgoConfig"],
    "verl.utils": ["as_torch_index", "group_mean_std"],
    "verl.utils.device": ["get_device_name", "get_torch_device"],
    "verl.workers": [],
    "verl.workers.config": ["ActorConfig"],
}
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
PENALTIES = ("kl", "abs", "mse", "low_var_kl")
CONTROLLER = [(0.001, 0.05, 16), (0.001, 0.11, 64), (0.2, 5.0, 256)]  # coefficient, KL, completions


@contextmanager
def formulas_of(wheel: Path) -> Iterator[Any]:
    """verl's module of formulas, while the modules that it imports are stand-ins."""
    before = {name: sys.modules.get(name) for name in ABSENT}
    for name, classes in ABSENT.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update({each: type(each, (), {}) for each in classes})
    sys.modules["verl.utils.import_utils"] = ModuleType("verl.utils.import_utils")
    vars(sys.modules["verl.utils.import_utils"])["deprecated"] = lambda *_: lambda function: function
    try:
        with zipfile.ZipFile(wheel) as files:
            for name in ("verl.utils.torch_functional", "verl.trainer.ppo.core_algos"):
                module = sys.modules[name] = ModuleType(name)
                parent, _, last = name.rpartition(".")
                setattr(sys.modules.setdefault(parent, ModuleType(parent)), last, module)
                exec(compile(files.read(f"{name.replace('.', '/')}.py"), name, "exec"), vars(module))
        yield module
    finally:
        for name, earlier in before.items():
            sys.modules.pop(name) if earlier is None else sys.modules.__setitem__(name, earlier)


def inputs() -> dict[str, torch.Tensor]:
    """Four completions of up to twelve tokens, in double precision; tokens of tools and padding are masked."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(4, 12, generator=generator, dtype=torch.float64)

    mask = torch.tensor(
        [
            [1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1],
            [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
            [1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0],
        ],
        dtype=torch.float64,
    )
    logprobs = -normal().abs()
    return {
        "mask": mask,
        "rewards": normal() * mask,
        "values": normal(),
        "new_values": normal(),
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.5 * normal(),
        "reference": logprobs + normal(),
    }


def table(core: Any) -> dict[str, Any]:
    given = inputs()
    mask = given["mask"]
    rewards, values = given["rewards"], given["values"]
    advantages, returns = core.compute_gae_advantage_return(
        rewards, values, mask, torch.tensor(0.97), torch.tensor(0.9)
    )
    value_loss, clipped = core.compute_value_loss(given["new_values"], returns, values, mask, cliprange_value=0.5)
    old, new = given["old_logprobs"], given["logprobs"]
    policy = {
        mode: core.compute_policy_loss(
            old, new, advantages, mask, cliprange=0.2, cliprange_high=0.28, clip_ratio_c=3.0, loss_agg_mode=mode
        )[0]
        for mode in MODES
    }
    controllers = []
    for coefficient, kl, completions in CONTROLLER:
        controller = core.AdaptiveKLController(coefficient, 0.1, 10000)
        controller.update(kl, completions)
        controllers.append(controller.value)
    return {
        "inputs": {name: tensor.tolist() for name, tensor in given.items()},
        "gamma": 0.97,
        "lam": 0.9,
        "advantages": (advantages * mask).tolist(),
        "returns": (returns * mask).tolist(),
        "value_loss": float(value_loss),
        "value_clipfrac": float(clipped),
        "policy_loss": {mode: float(loss) for mode, loss in policy.items()},
        "kl": {kind: core.kl_penalty(new, given["reference"], kind).tolist() for kind in PENALTIES},
        "controller": [[*case, value] for case, value in zip(CONTROLLER, controllers, strict=True)],
    }


if __name__ == "__main__":
    with formulas_of(Path(sys.argv[1])) as core:
        TABLE.write_text(json.dumps(table(core)) + "\n")
