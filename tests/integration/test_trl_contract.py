"""What our hooks rely on in TRL and transformers, checked against the installed versions.

A failure names the hook that moved and the module of ours that must follow. `make test-trl-next` runs this with the
next TRL.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl_hooks
from differential_rows import ROWS
from random_configurations import COVERING, FIELDS, draw
from trl import DPOTrainer, GRPOConfig, GRPOTrainer
from trl.trainer import dpo_trainer, reward_trainer
from trl_contract import INSTALLED, LOSS, PROMPTS, ROLLOUT, SHARDING, TRAINING, moved, page_is_as_made_by, twice
from trl_hooks import ATTRIBUTES, ELSEWHERE, HOOKS, METHODS, ROOT, assigned_to_self, is_private, modules, touched, users
from trl_table import DRAWN, IRRELEVANT, REFUSED, SHOWN_ARGUMENTS, SHOWN_FIELDS, SHOWN_METHODS

from async_grpo.credit import PPOConfig
from async_grpo.errors import UnsupportedError
from async_grpo.settings import TrainingSettings
from async_grpo.setup.grpo_config.values import SOURCES, annotations_in, field_types, parsed
from async_grpo.setup.overrides import EFFECTS, HONOURED
from async_grpo.training.before_start import refuse
from async_grpo.training.schedule import groups_per_round
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, chat_rows, letters
from kit.tools import multiply

BY_READERS: dict[tuple[str, ...], str] = {
    (TRAINING, ROLLOUT): "environments environment_factories rollout_func tools accelerator state",
    (TRAINING, PROMPTS): "num_generations train_dataset",
    (TRAINING, SHARDING): "is_deepspeed_enabled",
    (TRAINING,): "callback_handler",
    (SHARDING,): "is_fsdp_enabled",
    (PROMPTS,): "shuffle_dataset",
    (ROLLOUT,): "eos_token_ids reward_func_names ref_model",
    (LOSS,): "importance_sampling_level epsilon_low epsilon_high use_vllm vllm_importance_sampling_correction",
    (LOSS, PROMPTS, "async_grpo.training.schedule"): "num_iterations",
    ("async_grpo.setup.sampling",): "generation_config",
}
READ = {name: modules for modules, names in BY_READERS.items() for name in names.split()}
"""Public attributes, and who reads them; the private ones are in `trl_hooks`."""


# --- Names and signatures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", METHODS)
def test_hook_has_its_parameters(hook: str) -> None:
    method = getattr(GRPOTrainer, hook, None)
    assert callable(method), moved(f"GRPOTrainer.{hook}", "is gone", *users(hook))
    parameters = list(inspect.signature(inspect.unwrap(method)).parameters.values())[1:]
    names, wanted = tuple(parameter.name for parameter in parameters), METHODS[hook]
    assert names[: len(wanted)] == wanted, moved(f"GRPOTrainer.{hook}", f"takes {names}, not {wanted}", *users(hook))
    required = [
        parameter.name
        for parameter in parameters[len(wanted) :]
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert not required, moved(f"GRPOTrainer.{hook}", f"now also requires {required}", *users(hook))


def test_of_every_method_it_is_known_what_an_override_does() -> None:
    methods = {name for cls in GRPOTrainer.__mro__[:-1] for name, it in vars(cls).items() if inspect.isfunction(it)}
    for name in methods - set(HONOURED):
        pytest.fail(moved(f"GRPOTrainer.{name}", "is new", "async_grpo.setup.overrides"))


@pytest.mark.parametrize("attribute", [*READ, *(name for name in ATTRIBUTES if HOOKS[name].where == trl_hooks.EVERY)])
def test_trainer_has_the_attribute(attribute: str, trainer: GRPOTrainer) -> None:
    change = moved(f"GRPOTrainer.{attribute}", "is gone", *(READ.get(attribute) or users(attribute)))
    assert hasattr(trainer, attribute), change


def test_a_trainer_with_environments_keeps_them_in_a_pool(tmp_path: Path) -> None:
    class Environment:
        def reset(self, **row: Any) -> str:
            return ""

    given = {"arguments": {"environment_factory": Environment}, "train_dataset": chat_rows()}
    trainer: Any = build_trainer(tmp_path, chat_template=QWEN3_CHAT_TEMPLATE, reward_funcs=[letters], **given)
    for name in (name for name in ATTRIBUTES if HOOKS[name].where == trl_hooks.WITH_ENVIRONMENTS):
        assert isinstance(getattr(trainer, name, None), dict), moved(f"GRPOTrainer.{name}", "is no dict", *users(name))
    trainer._generate_and_score_completions(twice(chat_rows(2)))
    for name in (name for name in ATTRIBUTES if HOOKS[name].where == trl_hooks.GENERATING_WITH_ENVIRONMENTS):
        right = False if name == "_multi_environment" else [None] * 4
        assert getattr(trainer, name, "gone") == right, moved(f"GRPOTrainer.{name}", f"is not {right}", *users(name))


def test_a_trainer_with_tools_has_those_of_each_completion_by_name(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    names = [name for name in ATTRIBUTES if HOOKS[name].where == trl_hooks.GENERATING_WITH_TOOLS]

    class Recording(GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            seen.update({name: getattr(self, name, None) for name in names})
            raise InterruptedError

    trainer: Any = build_trainer(
        tmp_path, trainer_class=Recording, chat_template=QWEN3_CHAT_TEMPLATE, arguments={"tools": [multiply]}
    )
    assert trainer._standalone_tools == [multiply], moved("GRPOTrainer._standalone_tools", "are not the tools")
    with pytest.raises(InterruptedError):
        trainer._generate_and_score_completions(twice(chat_rows(2)))
    assert len(seen) == 2
    for name, value in seen.items():
        right = [{"multiply": multiply}] * 4 if name == "_sync_tool_dicts" else [{}] * 4
        assert value == right, moved(f"GRPOTrainer.{name}", f"is {value} while it generates", *users(name))


def private_names_of_trl(trainer: GRPOTrainer) -> set[str]:
    """Collect the names of its class and the classes below it, and what their methods assign to `self`."""
    found = set(vars(trainer))
    for cls in GRPOTrainer.__mro__[:-1]:
        found |= {*vars(cls), *assigned_to_self(ast.parse(inspect.getsource(inspect.getmodule(cls) or GRPOTrainer)))}
    return set(filter(is_private, found))


def test_every_private_name_that_we_touch_is_in_the_table(trainer: GRPOTrainer) -> None:
    of_trl = private_names_of_trl(trainer)
    unpinned = {module.name: names for module in modules() if (names := touched(module) & of_trl - HOOKS.keys())}
    assert not unpinned, f"{unpinned}: add them to tests/integration/trl_hooks.py"


def test_private_names_of_trl_are_touched_by_the_modules_of_the_list_and_no_others() -> None:
    of_trl = [*HOOKS, *(name for name in ELSEWHERE if name.startswith("trl."))]
    listed = tomllib.loads((ROOT / "house.toml").read_text())["trl"]["modules"]
    assert sorted({module for name in of_trl for module in users(name)}) == listed, "house.toml"


@pytest.mark.parametrize("name", [*HOOKS, *ELSEWHERE])
def test_every_name_of_the_table_is_touched_by_a_module(name: str) -> None:
    assert users(name), f"no module touches {name}: take it out of tests/integration/trl_hooks.py"


def test_the_page_has_this_table() -> None:
    assert page_is_as_made_by(ROOT / "scripts" / "trl_hooks.py"), "run: python scripts/trl_hooks.py --write"


def test_the_types_of_what_we_read(trainer: Any) -> None:
    def check(right: bool, attribute: str, change: str) -> None:
        assert right, moved(f"GRPOTrainer.{attribute}", change, *(READ.get(attribute) or users(attribute)))

    check(trainer._metrics["train"]["never logged"] == [], "_metrics", "is no dict of defaultdict(list)")
    check(trainer._step == 0, "_step", "does not count forward passes from 0")
    check(trainer._buffered_inputs is None, "_buffered_inputs", "is not None before the first batch")
    check(trainer.environments is None, "environments", "is not None without an environment")
    check(trainer.environment_factories is None, "environment_factories", "is not None without one")
    check(trainer.rollout_func is None, "rollout_func", "is not None without one")
    check(trainer.tools == [], "tools", "is not [] without tools")
    check(trainer.generation_config.max_new_tokens == 8, "generation_config", "is not the trainer's")
    check(trainer.generation_config.temperature == 1.0, "generation_config", "lacks the temperature")
    check(trainer._tokenizer.eos_token_id in trainer.eos_token_ids, "eos_token_ids", "lacks the end token")
    check(trainer.reward_func_names == ["letters"], "reward_func_names", "is no list of function names")
    check(isinstance(trainer.callback_handler.callbacks, list), "callback_handler", "has no list of callbacks")


def test_batch_sizes(tmp_path: Path) -> None:
    made = build_trainer(tmp_path, per_device_train_batch_size=2, steps_per_generation=4, gradient_accumulation_steps=2)
    sizes = made.args.generation_batch_size, made.num_generations, made.args.steps_per_generation
    assert sizes == (8, 2, 4), moved("GRPOConfig.generation_batch_size", "is not batch x steps", TRAINING, PROMPTS)
    assert groups_per_round(made) == 4


def test_transformers_functions_that_we_call(trainer: Any) -> None:
    ends = tuple(inspect.signature(trainer.callback_handler.on_train_end).parameters)
    assert ends[:3] == ("args", "state", "control"), moved("CallbackHandler.on_train_end", f"takes {ends}", TRAINING)


def test_the_fields_of_a_configuration_are_in_the_sources_where_we_read_them() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(PPOConfig)}
    assert field_types().keys() == fields.keys(), "setup/grpo_config/values.py: SOURCES"
    assert annotations_in(SOURCES).keys() == {field.name for field in dataclasses.fields(GRPOConfig)}
    plain = {name: default for name, default in fields.items() if type(default) in (bool, int, float)}
    given = {name: str(default) for name, default in plain.items() if name not in ("max_steps", "seed")}
    found = parsed(given)
    assert {name: found[name] for name in given} == {name: plain[name] for name in given}
    assert len(given) > 80


# --- Trainers of pairs ------------------------------------------------------------------------------------


def test_trainers_of_pairs_take_the_token_ids_that_we_give() -> None:
    """`DPOTrainer` prepares its dataset in one method; `chosen_ids` are the completion there, and all for rewards."""
    prepare = inspect.signature(DPOTrainer._prepare_dataset).parameters
    assert [*prepare][:5] == ["self", "dataset", "processing_class", "args", "dataset_name"]
    assert "self._prepare_dataset(train_dataset, processing_class, args" in inspect.getsource(DPOTrainer.__init__)
    pair = {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5]}
    of_dpo = dpo_trainer.DataCollatorForPreference(pad_token_id=0)([pair])
    assert of_dpo["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 5, 0]]
    assert of_dpo["completion_mask"].tolist() == [[0, 0, 1, 1], [0, 0, 1, 0]]
    of_rewards = reward_trainer.DataCollatorForPreference(pad_token_id=0)([pair])
    assert of_rewards["input_ids"].tolist() == [[3, 4], [5, 0]]
    assert dpo_trainer.DPOConfig.max_length == reward_trainer.RewardConfig.max_length == 1024, "so both are set to None"


# --- Every field, argument and method of TRL's trainer is in `trl_table`, and what it says of them holds ---------

OF_HOOKS = {*(hook.test for hook in HOOKS.values()), *(test for _, test in ELSEWHERE.values())}
TESTS = sorted({test for _, test, _ in SHOWN_FIELDS + SHOWN_ARGUMENTS} | {*SHOWN_METHODS.values()} | OF_HOOKS)


def once_each(names: list[str], existing: set[str], what: str) -> None:
    new = sorted(existing - set(names))
    assert not new, f"{INSTALLED}: {what} {', '.join(new)} are in no table of tests/integration/trl_table.py"
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"{what} {', '.join(twice)} are there twice"
    gone = sorted(set(names) - existing)
    assert not gone, f"{INSTALLED}: {what} {', '.join(gone)} are gone"


def test_the_page_has_these_tables() -> None:
    assert page_is_as_made_by(ROOT / "scripts" / "trl_table.py"), "run: python scripts/trl_table.py --write"


def test_every_field_is_shown_refused_or_irrelevant() -> None:
    grouped = [names for _, _, names in SHOWN_FIELDS] + [names for _, names in IRRELEVANT]
    names = [name for group in grouped for name in group.split()]
    names += [*DRAWN, *(name for name, _, _ in REFUSED)]
    once_each(names, {field.name for field in dataclasses.fields(GRPOConfig)}, "fields")


def test_every_argument_is_shown() -> None:
    names = [name for _, _, group in SHOWN_ARGUMENTS for name in group.split()]
    once_each(names, set(inspect.signature(GRPOTrainer.__init__).parameters) - {"self"}, "arguments")


def test_an_override_of_each_effect_is_shown() -> None:
    """Whether the table of methods itself is complete is part of the contract (`test_trl_contract`)."""
    assert set(SHOWN_METHODS) <= set(HONOURED)
    assert {HONOURED[name] for name in SHOWN_METHODS} == set(EFFECTS) - {"is not called by training, in TRL neither"}


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("test", TESTS)
def test_the_test_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    name, _, row = name.removesuffix("]").partition("[")
    assert name in functions_of(path) and (not row or row in ROWS), f"a table names {test}, which does not exist"


def test_the_drawn_fields_are_drawn_with_each_of_their_values(model_folder: str) -> None:
    """Already in the configurations that `make test` takes."""
    values: dict[str, set[str]] = {name: {"left out"} for name in DRAWN}
    for seed in COVERING:
        for name, value in draw(seed, model_folder).items():
            values.setdefault(name, set()).add(repr(value))
    assert not [name for name in FIELDS if {*map(repr, FIELDS[name])} - values[name]]
    assert not [name for name in DRAWN if len(values[name]) < 2]


@pytest.mark.parametrize(("name", "value", "sentence"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_what_is_refused_is_refused_with_its_sentence(name: str, value: Any, sentence: str, tmp_path: Path) -> None:
    trainer: Any = build_trainer(tmp_path)
    refuse(trainer, TrainingSettings(), None)
    setattr(trainer.args, name, value)
    with pytest.raises(UnsupportedError, match=sentence):
        refuse(trainer, TrainingSettings(), None)
