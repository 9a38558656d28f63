"""A completion with its turns and tools, as steps of TRL's own tool loop.

TRL's loop calls tools and asks for tokens in the middle of a function. It is a function of what tools and model
answer, so a turn is called up to three times: until it has called its tools, which are only noted; with their results,
until it asks for tokens; with the tokens. What is counted, cut, rolled back and masked is TRL's.

The private names of TRL's trainer that it touches are in the table of `tests/integration/trl_hooks.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from async_grpo.engines import PreparedGroup, stop_tags
from async_grpo.errors import RunRefused
from async_grpo.images import images_in
from async_grpo.records import Job
from async_grpo.rollout.left import Left, leave, left
from async_grpo.rollout.threads import refusing_signals
from async_grpo.rollout.trl_group import GeneratedGroup, rows_of
from async_grpo.rollout.trl_trainer import Images, RolloutBatch, RolloutTrainer
from async_grpo.rollout.turns.calls import Call, Outcome, giving, giving_later, noting, starting
from async_grpo.tokens import Tokens, ids_and_logprobs
from async_grpo.tokens.transcript import Transcript

_DUMMY = "dummy"


Tokenized = tuple[list[int], Images, Any]  # a prompt's tokens, its images, and what a processor made of them


class Dialogue:
    """One completion on its way: `begin`, then `calls`, `prompt_after` and `add` as long as it `wants_tools`.

    Args:
        group: the dialogue's, with the message that it begins with, and the index of its completion.
    """

    def __init__(
        self, trl: RolloutTrainer, group: PreparedGroup, prompt: Tokenized, ends: MessageEnds, results: ToolResults
    ) -> None:
        self._trl = trl
        self._ends = ends
        self._results = results
        self.tool_images: list[Any] = []
        self._trainer = copy.copy(trl.trainer)
        self._tools = [_at(trl.trainer, name, group.first_index) for name in ("_sync_tool_dicts", "_async_tool_dicts")]
        self._group = group
        self._most_turns = self._trainer.max_tool_calling_iterations
        self._trainer.max_tool_calling_iterations = 1
        self._trainer.environments = None
        ids, self._images, self._fields = prompt
        self.transcript = Transcript(ids)
        self.prompt = self._asked([ids], self._images, self._fields)  # the first one
        self.messages: Any = None  # the completion, as TRL has it
        self._suffix: list[int] | None = None  # what the tools of this turn add to the prompt
        self.call_count = self.failure_count = 0

    def begin(self, first: Tokens) -> None:
        self.transcript.write(first)
        if not self._trainer.tools:
            return
        tokenized = [self.transcript.prompt_ids], self._images, self._fields or {}
        self._trainer._tokenize_prompts = lambda prompts: tokenized
        self._trainer._generate_single_turn = lambda *_, **__: ids_and_logprobs([first])
        self._trainer._tool_call_loop = leave
        call = _left(type(self._trainer)._generate, self._trainer, [self._group.prompt])
        self.messages = call.arguments[3][0]
        del self._trainer._tool_call_loop

    @property
    def wants_tools(self) -> bool:
        return bool(self.messages) and self.transcript.turns <= self._most_turns and bool(_calls_of(self.messages))

    def calls(self) -> list[Call]:
        """The tools of the last message, to be run; those that do not exist are TRL's to answer."""
        noted: list[Call] = []
        self._set_tools(lambda name, tool: noting(noted, name, tool), lambda name, tool: starting(noted, name, tool))
        self._trainer._get_tool_suffix_ids = leave
        _left(self._turn)
        return noted

    def prompt_after(self, outcomes: Sequence[Outcome]) -> PreparedGroup | None:
        """What the model is to continue now; None: no token is left, the completion stays as it is."""
        self._suffix = None
        self._answer_with(outcomes)
        self._trainer._generate_single_turn = leave
        try:
            result = self._turn()
        except Left as call:
            return self._asked(*call.arguments, **call.keywords)
        self.call_count, self.failure_count = self.call_count + result[4], self.failure_count + result[5]
        self.messages = self._before(result)
        return None

    def add(self, outcomes: Sequence[Outcome], next_turn: Tokens) -> None:
        self._answer_with(outcomes)
        self._trainer._generate_single_turn = lambda *_, **__: ids_and_logprobs([next_turn])
        masks, completions, ids, _, calls, failures, images = self._turn()
        self.messages = self._before([masks, completions])
        before = len(self.transcript.tokens)
        left = sum(masks[0][before:])  # of the turn, which TRL may have cut
        self.transcript.read(ids[0][before : len(ids[0]) - left])
        self.transcript.write(next_turn[:left])
        self.call_count, self.failure_count = self.call_count + calls, self.failure_count + failures
        self.tool_images += images[0]
        if images[0]:
            self._images = [[*((self._images or [None])[0] or []), *images[0]]]

    def end(self) -> None:
        """End the last message as the chat template does, where a tag has ended it. The loss does not see that."""
        missing = self._ends.last_missing_after(self.transcript.tokens.ids)
        if len(self.transcript.tokens) + len(missing) <= self._trainer.max_completion_length:
            self.transcript.read(missing)

    def _turn(self) -> Any:
        ids, logprobs = ids_and_logprobs([self.transcript.tokens])
        return type(self._trainer)._tool_call_loop(
            self._trainer,
            [[]],
            [self.transcript.prompt_ids],
            ids,
            [[self.messages[-1]]],
            logprobs,
            self._images,
            {} if self.tool_images else self._fields or {},
        )

    def _before(self, result: Sequence[Any]) -> Any:
        return [*self.messages[:-1], *result[1][0]]

    def _asked(
        self,
        ids: Any,
        images: Images = None,
        fields: Any = None,
        num_generations: int = 1,
        has_tool_images: bool = False,
    ) -> PreparedGroup:
        if self.tool_images and not has_tool_images:  # of an earlier turn; TRL's loop sees all of its turns at once
            assert self._images is not None
            processor = self._trainer.processing_class.image_processor
            images, has_tool_images = self._images, True
            fields = dict(processor(images=self._images[0], return_tensors="pt"))
        ids, images, fields = self._trl.turn_asked(ids, images, fields, num_generations, has_tool_images)
        made = (fields,) if fields else ()
        return replace(self._group, prompt_ids=ids, images=images, fields=made, turn=self.transcript.turns)

    def _answer_with(self, outcomes: Sequence[Outcome]) -> None:
        left = iter(outcomes)
        self._set_tools(lambda *_: giving(left), lambda *_: giving_later(left))
        self._trainer._get_tool_suffix_ids = self._suffix_ids

    def _suffix_ids(self, tool_messages: Any) -> list[int]:
        """Made once a turn: TRL's loop asks for it before the model goes on, and again with what it wrote."""
        if self._suffix is None:
            end = self._ends.missing_after(self.transcript.tokens.ids)
            self._suffix = [*end, *self._results.written(tool_messages)]
        return self._suffix

    def _set_tools(self, sync: Callable[[str, Any], Any], later: Callable[[str, Any], Any]) -> None:
        now, waited_for = self._tools
        self._trainer._sync_tool_dicts = [{name: sync(name, tool) for name, tool in now.items()}]
        self._trainer._async_tool_dicts = [{name: later(name, tool) for name, tool in waited_for.items()}]


class MessageEnds:
    """How messages end that a tag ends (`</tool>`): as the chat template ends them, by tokens that no model sampled.

    Where the tokenizer has no stop tags, every message ends as the model ended it."""

    def __init__(self, trainer: Any) -> None:
        self._tags = stop_tags(trainer)
        self._tokenizer = trainer.processing_class
        self._eos = set(trainer.eos_token_ids) if self._tags else set()
        self._ids = self._written() if self._tags else []

    def missing_after(self, ids: Sequence[int]) -> list[int]:
        """The tokens that the chat template writes after these, where a tag ended the message and not the model."""
        if not self._tags or not ids or ids[-1] in self._eos:
            return []
        tail = self._tokenizer.decode(ids[-max(map(len, self._tags)) :])
        return list(self._ids) if any(tag in tail for tag in self._tags) else []

    def last_missing_after(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens up to the end token, by which TRL sees that a completion was not cut."""
        missing = self.missing_after(ids)
        ends = [index for index, token in enumerate(missing) if token in self._eos]
        return missing[: ends[0] + 1] if ends else []

    def _written(self) -> list[int]:
        tokenizer = self._tokenizer
        dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _DUMMY}]
        text = tokenizer.apply_chat_template(dialogue, tokenize=False).rpartition(_DUMMY)[2]
        before, eos, _ = text.partition(tokenizer.eos_token)  # as TRL's loop, which aligns at the end token
        return list(tokenizer(before + eos, add_special_tokens=False)["input_ids"])


class ToolResults:
    """Tool results as TRL writes them. It renders what stands before them, too: that is kept for the next ones."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = copy.copy(trainer)
        self._trainer.processing_class = copy.copy(trainer.processing_class)
        self._trainer.processing_class.apply_chat_template = self._rendered
        self._render = trainer.processing_class.apply_chat_template
        self._kept: dict[str, tuple[Any, Any]] = {}  # what was rendered, and its tokens

    def written(self, messages: Any) -> list[int]:
        """The tokens of the messages of one turn's tools, and of the start of the model's next one."""
        try:
            return self._tokens_of(messages)
        except ValueError:  # the template writes the time
            self._kept.clear()
            return self._tokens_of(messages)

    def _tokens_of(self, messages: Any) -> list[int]:
        return type(self._trainer)._get_tool_suffix_ids(self._trainer, messages)

    def _rendered(self, conversation: Any, *more: Any, **options: Any) -> Any:
        if more or options.get("add_generation_prompt"):
            return self._render(conversation, *more, **options)
        key = repr((conversation, options))
        if key not in self._kept:
            self._kept[key] = conversation, self._render(conversation, **options)
        return copy.deepcopy(self._kept[key][1])  # a method of the user's may change what it gets


class Dialogues:
    """The G dialogues of one group.

    Args:
        trl: a copy of the worker's trainer that no other group uses. All is done in one call of its view.
    """

    def __init__(self, trl: RolloutTrainer, job: Job, version: int) -> None:
        self.trl, self.job, self.version = trl, job, version
        self.all: list[Dialogue] = []
        self._rows: list[dict[str, Any]] = []
        self._prompts: list[Any] = []
        self._tokenized: tuple[Any, Any, Any] = ([], None, {})

    def begin(self) -> None:
        """Have TRL make the prompts: environments are reset."""
        trainer = self.trl.trainer
        trainer._generate = leave
        self._rows = rows_of(self.job)
        with refusing_signals():
            (self._prompts,) = _left(trainer._generate_and_score_completions, self._rows).arguments
        prompts, ends, results = self._first_prompts(trainer), MessageEnds(trainer), ToolResults(trainer)
        for index, (message, prompt) in enumerate(zip(self._prompts, prompts, strict=True)):
            group = PreparedGroup(job=self.job, version=self.version, prompt_ids=[], prompt=message, first_index=index)
            self.all.append(Dialogue(self.trl, group, prompt, ends, results))

    def _first_prompts(self, trainer: Any) -> list[Tokenized]:
        copies = copy.deepcopy(self._prompts)
        if not any(map(images_in, self._prompts)):
            self._tokenized = trainer._tokenize_prompts(copies)
            return [(list(ids), None, None) for ids in self._tokenized[0]]
        names = getattr(trainer, "_batch_environments", None)
        made = []
        for index, prompt in enumerate(copies):  # each with the fields of its own images
            if names is not None:
                trainer._batch_environments = [names[index]]
            ids, images, fields = trainer._tokenize_prompts([prompt])
            made.append((list(ids[0]), images, fields))
        if names is not None:
            trainer._batch_environments = names
        self._tokenized = ([ids for ids, *_ in made], [(images or [None])[0] for _, images, _ in made], {})
        return made

    def finish(self) -> GeneratedGroup:
        """Have TRL make the group's result, and count it."""
        trainer = copy.copy(self.trl.trainer)
        for dialogue in self.all:
            dialogue.end()
        tokens = [dialogue.transcript.tokens for dialogue in self.all]
        vars(trainer).pop("_generate", None)
        trainer._tokenize_prompts = lambda prompts: self._tokenized
        if trainer.tools:
            trainer._generate_single_turn = lambda *_, **__: ([], None)  # all messages are read already
            trainer._tool_call_loop = lambda *_: self._result(tokens)
        else:
            trainer._generate_single_turn = lambda *_, **__: ids_and_logprobs(tokens)
        result = trainer._generate(self._prompts)
        batch = RolloutBatch(trainer, self._rows, self._prompts, result, self.trl.view.now(), self.trl.data_has_images)
        return batch.group(self.job, slice(None), self.version, tokens)

    def _result(self, tokens: list[Tokens]) -> tuple[Any, ...]:
        """As `GRPOTrainer._tool_call_loop` returns it."""
        return (
            [each.mask for each in tokens],
            [dialogue.messages for dialogue in self.all],
            *ids_and_logprobs(tokens),
            sum(dialogue.call_count for dialogue in self.all),
            sum(dialogue.failure_count for dialogue in self.all),
            [dialogue.tool_images for dialogue in self.all],
        )


def _left(function: Callable[..., Any], *arguments: Any) -> Left:
    call = left(function, *arguments)
    if call is None:
        raise RunRefused("TRL's tool loop did not come to the place where it was to stop. Is this TRL supported?")
    return call


def _calls_of(messages: Any) -> Any:
    last = messages[-1]
    return last.get("tool_calls") if isinstance(last, dict) else None


def _at(trainer: Any, name: str, index: int) -> dict[str, Any]:
    """The tools of one completion, by name."""
    return dict(getattr(trainer, name)[index]) if trainer.tools else {}
