"""What TRL's asynchronous trainer asks of a weight-transfer backend, read from its source, and what ours offers."""

from __future__ import annotations

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path

from async_grpo_ipc import SharedWeightTransfer


def methods_of(protocol: str) -> dict[str, list[str]]:
    """Name and parameters of each. The module itself takes many seconds to import."""
    package = find_spec("trl")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "experimental" / "async_grpo" / "async_grpo_trainer.py"
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    (found,) = [node for node in classes if node.name == protocol]
    functions = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    return {function.name: [argument.arg for argument in function.args.args] for function in functions}


def test_shared_weight_transfer_is_what_trls_trainer_asks_for() -> None:
    asked = methods_of("WeightTransferProtocol")
    assert set(asked) == {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}, "TRL asks for more"
    for name, parameters in asked.items():
        ours = list(inspect.signature(getattr(SharedWeightTransfer, name)).parameters)
        assert ours == parameters, f"TRL: {name} takes {parameters}; async_grpo_ipc.vllm_feed must follow"
