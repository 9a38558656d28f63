"""The trainer as code of the user's reads it in a worker: what it finds there is true, or ends the run.

Reward functions, tools and overrides hold the trainer that the setup file built, or a copy of it. Only the server's is
trained. So all of them have the same stand-ins for what training changes: `state` is the server's when the job was
issued, what is added to `_metrics` is sent to the server, and what no worker can have refuses to be used.

Whose job a call is for is in a context variable, which threads and event loops carry (`threads`).
`tests/integration/test_trl_rewards.py` fails with the name of what a new TRL trains that has no stand-in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from transformers import TrainerState

from async_grpo.errors import AsyncGRPOError, RunRefused
from async_grpo.records import Job
from async_grpo.setup.trl_compat import is_adapter
from async_grpo.telemetry.trainer_states import StateAt, StateReader

COUNTED_BY_TRL_ALONE = frozenset({"tools/call_frequency", "tools/failure_frequency"})  # where it generates
COUNTED_BY_TRL = COUNTED_BY_TRL_ALONE | {  # and what the trainer side counts again
    *("num_tokens", "completions/mean_length", "completions/min_length", "completions/max_length"),
    *("completions/clipped_ratio", "completions/mean_terminated_length", "completions/min_terminated_length"),
    "completions/max_terminated_length",
}
WITH_THE_JOB = {  # fields of the state that the rest of a step leaves alone; all others are read when asked for
    *("epoch", "global_step", "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size"),
    *("num_train_epochs", "num_input_tokens_seen", "is_local_process_zero", "is_world_process_zero"),
    *("is_hyper_param_search", "trial_name", "trial_params", "stateful_callbacks"),
}
NOT_HERE = {  # of the trainer: why no worker has it, and in a second sentence what to do
    "optimizer": "only the server's trainer has one. Read it in a callback",
    "lr_scheduler": "only the server's trainer has one. Read the learning rates in trainer.state.log_history",
    "control": "callbacks run in the server. Stop the training, or save, in a callback",
    "callback_handler": "callbacks run in the server. Give them to the trainer in get_trainer()",
    "_logs": "the server logs. Use the argument log_extra of reward functions",
    "_step": "only the server's trainer counts. Use trainer.state.global_step",
    "_buffered_inputs": "only the server's trainer has batches. Do without it",
    "log": "only the server logs. Use the argument log_metric of reward functions",
    **dict.fromkeys(
        ("save_model", "save_state", "evaluate"), "only the server's trainer does that. Do it in a callback"
    ),
}
_USES = (
    *("call", "getitem", "setitem", "delitem", "iter", "len", "contains", "enter", "exit", "int", "float", "index"),
    *("neg", "abs", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"),
    *("floordiv", "rfloordiv", "mod", "rmod", "pow"),
)
_call: ContextVar[ScoringContext | None] = ContextVar("the job that code of the user's runs for", default=None)

Wait = Callable[[Callable[[], StateAt | None], str], StateAt]  # until something is there; of what it is said to be
_Values = defaultdict[str, list[Any]]
_none_yet = partial(defaultdict[str, list[Any]], list)


@dataclass(eq=False)
class ScoringContext:
    """Code of the user's that runs for a job, or for jobs of one kind: what it sees of the state, and what it says."""

    known: Mapping[str, Any] = field(default_factory=dict)  # fields of the state that came with the job
    job: Job | None = None
    scores: bool = False  # it is the reward functions
    later: Mapping[str, Any] | None = None  # all fields of the state, once another than those was asked for
    counted: _Values = field(default_factory=_none_yet)  # by TRL, of `COUNTED_BY_TRL`
    added: _Values = field(default_factory=_none_yet)  # to `_metrics`, by MODE/NAME
    logged: _Values = field(default_factory=_none_yet)  # `log_metric`
    extra: _Values = field(default_factory=_none_yet)  # `log_extra`
    error: AsyncGRPOError | None = None  # it ends the call, even where the user's code catches it

    def log_metric(self, name: str, value: float) -> None:
        self.logged[name].append(value)

    def log_extra(self, column: str, values: list[Any]) -> None:
        self.extra[column].extend(values)

    def taken(self, *others: ScoringContext) -> dict[str, Any]:
        """The fields `metrics` and `added` of a group, or of its scores. What code logs and adds is taken once.

        `metrics` have what TRL counted while generating that the trainer side cannot count again.

        Args:
            others: contexts whose values are sent with these.
        """
        metrics = {name: values for name, values in self.counted.items() if name in COUNTED_BY_TRL_ALONE}
        added: dict[str, list[Any]] = {}
        for context in (self, *others):
            for waiting, found in ((context.logged, metrics), (context.added, added)):
                for name in [*waiting]:  # meanwhile other threads add to it, and take of the others
                    if values := waiting.pop(name, None):
                        found[name] = found.get(name, []) + values
        return {"metrics": metrics, "added": added}


class TrainerView:
    """What code of the user's sees of `trainer` and of its copies.

    Args:
        states: what the server writes of each step.
        wait: until the server has come to a step that it has issued jobs at.
    """

    def __init__(self, trainer: Any, states: StateReader | None = None, wait: Wait | None = None) -> None:
        self._states, self._wait = states, wait or _without_waiting
        self._built_with = dict(vars(trainer.state))
        self.outside = ScoringContext(self._built_with)  # of code that runs in no call: it sees the newest issued
        self._under_way: list[ScoringContext] = []
        self.policy_is_here = False  # the engine samples with the trainer's own model
        trainer.model.register_forward_pre_hook(self._check_policy)
        trainer.state = IssuedState(self)
        trainer._metrics = {mode: MetricsToAdd(self, mode) for mode in ("train", "eval")}
        trainer._log_metric = lambda name, value: self.now().log_metric(name, value)
        trainer._log_completion_extra = self._log_extra
        trainer.is_in_train = True
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        not_here = dict(NOT_HERE)
        if trainer.ref_model is None and trainer.args.beta and not is_adapter(trainer.model):
            not_here["ref_model"] = "the server computes with it. Load a model of its own for a reward"
        if trainer.environment_factories is not None:
            not_here["environments"] = "each prompt group has its own. Use the argument environments of rewards"
        vars(trainer).update({name: NotHere(self, f"trainer.{name}", why) for name, why in not_here.items()})

    @contextmanager
    def during(
        self, job: Job, version: int, *, scores: bool = False, prompts: bool = False
    ) -> Iterator[ScoringContext]:
        """Run code for `job` in this block. What it refused is raised at its end, where it was caught.

        Args:
            version: of the weights; all that is known of a job without a state.
            scores: it is the reward functions.
            prompts: it makes a prompt. What it adds is sent with the next group that is scored, and threads that it
                starts do not find it.
        """
        sent, outside = job.trainer_state or {"global_step": version}, self.outside
        call = ScoringContext({name: sent.get(name, self._built_with[name]) for name in WITH_THE_JOB}, job, scores)
        if call.known["global_step"] >= outside.known["global_step"]:
            outside.known, outside.job, outside.later = call.known, job, None
        if prompts:
            call.added, call.logged = outside.added, outside.logged
        else:
            self._under_way.append(call)
        token = _call.set(call)
        try:
            yield call
        finally:
            _call.reset(token)
            if not prompts:
                self._under_way.remove(call)
            if (error := call.error or outside.error) is not None:
                raise error

    def now(self) -> ScoringContext:
        """The call that this code runs in. Threads of the user's see the one under way, or the newest issued."""
        if (call := _call.get()) is not None:
            return call
        calls = [*self._under_way]
        return calls[0] if calls and all(call.known == calls[0].known for call in calls) else self.outside

    def refuse(self, what: str, why: str) -> NoReturn:
        """Raise `RunRefused`, and again at the end of the call. `why` also says, in a second sentence, what to do."""
        way = "or train in one process (without --distributed)"
        self._fail(RunRefused(f"{what} cannot be used in a worker: {why}, {way}."))

    def asked_for(self, name: str, call: ScoringContext) -> Any:
        """A field of the state that did not come with the job, or one that a callback has put there."""
        if call.later is None:
            call.later = self._later(call)
        if name == "log_history" and name not in call.later:
            self.refuse("trainer.state.log_history", "there is no server that trains. Use other fields")
        if name not in call.later:
            raise AttributeError(f"'TrainerState' object has no attribute {name!r}")
        return call.later[name]

    def whole(self) -> TrainerState:
        """A state of its own, with all fields."""
        state, call = TrainerState(), self.now()
        self.asked_for("log_history", call)
        vars(state).update({**(call.later or {}), **call.known})
        return state

    def _later(self, call: ScoringContext) -> Mapping[str, Any]:
        if call.job is None:
            return self._built_with
        found = self._state_at(int(call.known["global_step"]), waits=call.job.purpose == "train")
        sent = {**self._built_with, **call.job.trainer_state}
        if found is None:
            return {name: value for name, value in sent.items() if name != "log_history"}
        return {**sent, **found.fields, "log_history": found.log}

    def _state_at(self, step: int, *, waits: bool) -> StateAt | None:
        states = self._states
        if states is None:
            return None
        if not waits:  # an evaluation may be what the server waits for
            return states.newest(step)
        try:
            return self._wait(lambda: states.at(step), f"the server to log step {step}")
        except AsyncGRPOError as error:
            self._fail(error)

    def _fail(self, error: AsyncGRPOError) -> NoReturn:
        self.now().error = error
        raise error

    def _log_extra(self, column: str, values: list[Any]) -> None:
        if not self.now().scores:
            why = "its values belong to completions that are scored. Call it in a reward function"
            self.refuse("log_extra outside of the reward functions", why)
        self.now().log_extra(column, values)

    def _check_policy(self, *_: Any) -> None:
        """The weights of a worker change while rewards are computed, unless the server waits for these very groups."""
        call = _call.get()
        if call is None or not call.scores:
            return
        if not self.policy_is_here:
            self.refuse("trainer.model in a reward function", "its engine has the weights. Load a model of its own")
        if call.job is None or call.job.min_version < call.job.born_version or call.job.purpose != "train":
            self.refuse(
                "trainer.model in a reward function",
                "its weights may change meanwhile. Use --max-staleness 0 without --eval-every, load another model",
            )


def _without_waiting(ready: Callable[[], StateAt | None], what: str) -> StateAt:
    found = ready()
    assert found is not None, f"would wait for {what}"
    return found


class IssuedState(TrainerState):
    """`trainer.state`, and `trainer_state` of reward functions: each look is at the state of the job at hand."""

    def __init__(self, view: TrainerView) -> None:
        object.__setattr__(self, "_view", view)

    def __getattribute__(self, name: str) -> Any:
        view: TrainerView = object.__getattribute__(self, "_view")
        if name == "__class__":
            return TrainerState
        if name not in TrainerState.__dataclass_fields__ and hasattr(TrainerState, name):
            return getattr(view.whole(), name)
        call = view.now()
        return call.known[name] if name in call.known else view.asked_for(name, call)

    def __setattr__(self, name: str, value: Any) -> None:
        view: TrainerView = object.__getattribute__(self, "_view")
        if name != "num_input_tokens_seen":  # TRL counts it while it generates
            view.refuse(f"trainer.state.{name} = …", "the server would not see it. Set it in a callback")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__getattribute__(self, "_view").whole().__reduce_ex__(protocol)


class NotHere:
    """In the place of what a worker cannot have. It may be tested and compared with None, and nothing else."""

    _view: TrainerView
    _name: str
    _why: str

    def __init__(self, view: TrainerView, name: str, why: str) -> None:
        vars(self).update(_view=view, _name=name, _why=why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._use()

    def __eq__(self, other: object) -> bool:
        return False if other is None else other is self or bool(self._use())

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return True

    def __setattr__(self, *_: Any) -> None:
        self._use()

    def _use(self, *_: Any, **__: Any) -> NoReturn:
        self._view.refuse(self._name, self._why)


class _AddOnly:
    """What is added is sent to the server, which has what was added before."""

    def __init__(self, view: TrainerView, mode: str) -> None:
        self._view, self._mode = view, mode

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._read()

    def _read(self, *_: Any, **__: Any) -> NoReturn:
        self._view.refuse("trainer._metrics", "what was logged is in the server. Only append to [mode][name]")

    __iter__ = __len__ = __contains__ = _read


class MetricsToAdd(_AddOnly):
    """`_metrics` of one mode."""

    def __getitem__(self, name: str) -> ValuesToAdd:
        return ValuesToAdd(self._view, self._mode, name)

    def setdefault(self, name: str, default: Any = None) -> ValuesToAdd:
        return self[name]

    def __setitem__(self, name: str, values: Any) -> None:
        if name in COUNTED_BY_TRL:
            self._view.now().counted[name] = list(values)
        elif not isinstance(values, ValuesToAdd):  # `+=` has added them
            self._view.refuse(f"trainer._metrics[{self._mode!r}][{name!r}] = …", "it is the server's. Append to it")


class ValuesToAdd(_AddOnly):
    """The values of one metric."""

    def __init__(self, view: TrainerView, mode: str, name: str) -> None:
        super().__init__(view, mode)
        self._name = name

    def append(self, value: float) -> None:
        call = self._view.now()
        values = call.counted[self._name] if self._name in COUNTED_BY_TRL else call.added[f"{self._mode}/{self._name}"]
        values.append(value)

    def extend(self, values: Any) -> None:
        for value in values:
            self.append(value)

    def __iadd__(self, values: Any) -> ValuesToAdd:
        self.extend(values)
        return self

    __getitem__ = __setitem__ = __eq__ = _AddOnly._read
    __hash__ = object.__hash__


for _name in _USES:
    setattr(NotHere, f"__{_name}__", NotHere._use)
