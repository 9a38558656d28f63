"""`--set NAME=VALUE`: values of `GRPOConfig` or `PPOConfig` that the command line gives in place of the setup file's.

Which fields there are, and their types, is read from the sources of TRL and transformers: importing them takes seconds,
and a wrong name is to be refused at once.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from async_grpo.errors import UsageError
from async_grpo.redaction import Redactor

SOURCES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
)
"""`GRPOConfig` and its bases, the base first; tests/integration/test_trl_contract.py compares with the class."""
_OF_A_CRITIC = ("async_grpo", "credit/ppo_config.py", "PPOConfig")

_ELSEWHERE = {
    "max_steps": "it is --steps.",
    "seed": "it is --seed.",
    "max_prompt_length": "TRL no longer cuts prompts. Cut them, or leave long ones out, where the dataset is made.",
    "hub_token": "run.json keeps these values, and a token is a secret: set HF_TOKEN in the environment.",
    "resume_from_checkpoint": "it is --resume.",
}
COMMIT = re.compile(r"\b[0-9a-f]{40}\b")  # the revision of a model: a redactor takes it for a key
_redact = Redactor()


def parsed(texts: Mapping[str, str]) -> dict[str, Any]:
    """The values of these fields, each of the type that its annotation names. Imports neither TRL nor torch.

    Raises:
        UsageError: a field that does not exist, with the nearest name; a text that is not of the field's type, or that
            looks like a secret.
    """
    return {name: _value(name, text) for name, text in texts.items()}


def as_set(name: str, value: object) -> str:
    """The value of a field as `--set` takes it: JSON where it is neither a text nor a path.

    Raises:
        UsageError: it has what JSON has not, of which other processes would get something else.
    """

    def path_or_nothing(part: object) -> str:
        if isinstance(part, PurePath):
            return str(part)
        raise UsageError(
            f"{name} has a {type(part).__name__}, which JSON has not, and the processes of a run get it as JSON. Give "
            "numbers, texts, and lists or mappings of them."
        )

    if value is None:
        return "none"
    return str(value) if isinstance(value, (str, PurePath)) else json.dumps(value, default=path_or_nothing)


def _value(name: str, text: str) -> Any:
    fields = field_types()
    if name in _ELSEWHERE:
        raise UsageError(f"--set {name}: {_ELSEWHERE[name]}")
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f" Did you mean {near[0]}?" if near else " TRL's documentation of GRPOConfig lists all."
        raise UsageError(f"--set {name}: GRPOConfig has no field of this name.{hint}")
    if looks_secret(name, text):
        raise UsageError(
            f"--set {name}: run.json keeps these values, and this one looks like a secret. Let the setup file read it "
            "from the environment."
        )
    types = {*_names(ast.parse(fields[name], mode="eval").body)}
    for reader in (_none, _truth, _whole, _number, _json, _plain):
        value = reader(types, text)
        if value is not _NOT:
            return value
    raise UsageError(f"--set {name}={text}: {name} must be {_described(types)}, got {text!r}.")


def looks_secret(name: str, value: str) -> bool:
    """Whether a value of this name would be redacted in a log."""
    return _redact(given := f"{name}={COMMIT.sub('commit', value)}") != given


@functools.cache
def field_types() -> dict[str, str]:
    """The annotation of each field of `GRPOConfig` and `PPOConfig`, as their sources have it."""
    return annotations_in((*SOURCES, _OF_A_CRITIC))


def annotations_in(sources: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """The annotation of each field of these classes: package, file in it, class.

    Raises:
        UsageError: TRL or transformers is not installed, or has another layout.
    """
    found: dict[str, str] = {}
    for package, file, name in sources:
        spec = importlib.util.find_spec(package)
        source = Path(spec.origin).parent / file if spec is not None and spec.origin else None
        if source is None or not source.is_file():
            raise UsageError(f"The fields of {name} are read from {file} of {package}, which is not there.")
        classes = [node for node in ast.parse(source.read_bytes()).body if isinstance(node, ast.ClassDef)]
        bodies = [node.body for node in classes if node.name == name]
        annotated = [node for body in bodies for node in body if isinstance(node, ast.AnnAssign)]
        found |= {ast.unparse(node.target): ast.unparse(node.annotation) for node in annotated}
    return {name: types for name, types in found.items() if not types.startswith(("ClassVar", "InitVar"))}


_NOT = object()  # the text is not of this type


def _names(node: ast.expr) -> Iterator[str]:
    """`list[str] | str | None` -> "list", "str", "None"; of a `Literal` its values."""
    if isinstance(node, ast.BinOp):
        yield from (*_names(node.left), *_names(node.right))
    elif isinstance(node, ast.Subscript):
        kind = ast.unparse(node.value).rpartition(".")[2]
        if kind in ("Optional", "Union", "Literal"):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            yield from (name for part in parts for name in _names(part))
            yield from ["None"] if kind == "Optional" else []
        else:
            yield kind.lower()
    else:
        yield ast.unparse(node)


def _none(types: set[str], text: str) -> Any:
    """For `report_to`, whose type is `None | str | list[str]`, "none" is a name."""
    is_none = text.lower() in ("none", "null") and "None" in types and not types >= {"str", "list"}
    return None if is_none else _NOT


def _truth(types: set[str], text: str) -> Any:
    value = {"true": True, "false": False}.get(text.lower())
    return value if value is not None and types & {"bool", str(value)} else _NOT


def _whole(types: set[str], text: str) -> Any:
    try:
        return int(text) if "int" in types else _NOT
    except ValueError:
        return _NOT


def _number(types: set[str], text: str) -> Any:
    try:
        value = float(text) if "float" in types else math.nan
    except ValueError:
        return _NOT
    return _NOT if math.isnan(value) else value


def _json(types: set[str], text: str) -> Any:
    """A list or an object, where the field may be one."""
    try:
        value = json.loads(text)
    except ValueError:
        return _NOT
    return value if type(value).__name__ in types & {"list", "dict"} else _NOT


def _plain(types: set[str], text: str) -> Any:
    """The text itself. A `dict | str` is the text of an object, which `_json` has read, or a file that has one."""
    return text if "str" in types and ("dict" not in types or text.endswith(".json")) else _NOT


_WORDS = {
    "None": "none",
    "bool": "true or false",
    "False": "false",
    "int": "a whole number",
    "float": "a number",
    "list": "a list in JSON",
    "dict": "an object in JSON",
    "str": "a text",
}


def _described(types: set[str]) -> str:
    known = [
        word for name, word in reversed(_WORDS.items()) if name in types and not (name == "str" and "dict" in types)
    ]
    return ", or ".join(known) or "made in the setup file"
