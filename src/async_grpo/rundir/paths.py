"""Every path of a run directory, and what `run.json` says.

worker/
  run.json                      the plan of the run, and its state; written by the launcher and the server
  server.lock                   kernel lock: one parameter server at a time
  generator.lock                kernel lock: one worker that feeds a vLLM server, where there is one
  refused.json                  why a worker has ended the run, if one has
  queue/ done/ quarantine/ tmp/ alive/        the job queue
  ps_ipc_handle.json            where the weights lie (ps_ipc_handle_version.json: for people)
  log_parameter_server.txt  log_worker_1.txt  metrics.jsonl  consumed.jsonl  summary.json  tensorboard/
  chosen.jsonl                  with --choose-prompts: the dataset row of each job
  trainer_states.jsonl          the trainer's state at the beginning of each step, for reward functions
  evaluations.jsonl             what each evaluation found
  last_weights/                 of a run from Python: its last weights, where no checkpoint has them
  evaluated.json  comparison.json             of `evaluate`: whose weights, and one model less the other
  hyperparameters.json          what the trainer was set to; no secrets
  ranks.json                    the trainer's ranks, where it is on several machines
  nodes.json                    the machines of a run with --ray; log_nodes.txt, log_node_NAME.txt
  board/                        what `async-grpo board` made of the files above
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_grpo.errors import MOST_OF_A_REASON, AsyncGRPOError, BadFileError, RunDirError
from async_grpo.records import WorkerId
from async_grpo.rundir.files import write_json
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.rundir.shape import as_json, shaped

SERVER = "server"  # the parameter server, as a process of the run
FORMAT = 4
RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
SERVER_LOCK = "server.lock"
KEEP_LAST_WEIGHTS = "ASYNC_GRPO_KEEP_LAST_WEIGHTS"  # of the environment: the run was started from Python
ENTRIES = (  # of a run directory, apart from logs
    *("queue", "done", "quarantine", "tmp", "alive", "tensorboard", "board", "summary.json", "metrics.jsonl"),
    *("consumed.jsonl", "chosen.jsonl", "evaluations.jsonl", "evaluated.json", "comparison.json", "ranks.json"),
    *("hyperparameters.json", "last_weights", "last_weights.part", "trainer_states.jsonl", "nodes.json", "run.json"),
    *(SERVER_LOCK, "generator.lock", "refused.json", "ps_ipc_handle.json", "ps_ipc_handle_version.json"),
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a resume has changed, as it was."""

    state: str
    plan: RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What `run.json` holds: the plan of the run, and how far it is. Wall-clock times are for people."""

    run_id: str
    state: str  # running, finished, stopped, failed
    started: str  # when, for people
    plan: RunPlan
    step: int = 0  # optimizer steps done when the state was written
    why: str = ""  # the newest process failed, in one line
    run_dir: str = ""  # where the run directory was when a server last started in it, absolute
    started_in: str = ""  # the current folder then: a relative output_dir is relative to it
    output_dir: str = ""  # where the checkpoints are, absolute; empty until the trainer is built
    delta_dir: str = ""  # where the chain of deltas is, absolute; empty where there is none
    generator: str | None = None  # what the launcher's workers sample with, as the server found; None: unknown
    model: str = ""  # that is trained, and
    data: str = ""  # on what, as `setup.fingerprints` describes them
    tips: str = ""  # the warning that the policy runs away from its rollouts, if it was given
    tipped_at: float = 0.0  # learning rate x (1 + max_staleness) when it was last given; 0: never
    undo: Accepted | None = None  # until a server accepts the resume
    format: int = FORMAT


def no_run(root: Path) -> str:
    """Why there is no run in `root`, which has no `run.json`, and what to do."""
    if not root.exists():
        return f"{root} does not exist, so no run has begun there (yet). Name the directory of a run."
    what = "is not a run directory: it has no run.json" if root.is_dir() else "is a file"
    return f"{root} {what}. Name the directory of a run."


def activity_file(root: Path, name: str) -> Path:
    """Where process `name` of the run in `root` says what it does."""
    return root / "alive" / f"{name}.status"


class RunDir:
    """The run directory at `root`, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.state_file = self.root / "run.json"
        self.generator_lock = self.root / "generator.lock"
        self.metrics = self.root / "metrics.jsonl"
        self.trainer_states = self.root / "trainer_states.jsonl"
        self.consumption = self.root / "consumed.jsonl"
        self.chosen = self.root / "chosen.jsonl"
        self.summary = self.root / "summary.json"
        self.evaluations = self.root / "evaluations.jsonl"
        self.comparison = self.root / "comparison.json"
        self.evaluated = self.root / "evaluated.json"
        self.tensorboard = self.root / "tensorboard"
        self.hyperparameters = self.root / "hyperparameters.json"
        self.board = self.root / "board"
        self.nodes = self.root / "nodes.json"
        self.ranks = self.root / "ranks.json"
        self.last_weights = self.root / "last_weights"
        self.server_log = self.root / "log_parameter_server.txt"
        self.nodes_log = self.root / "log_nodes.txt"  # of the process that claims for workers of other machines
        self.vllm_server_log = self.root / "log_vllm_server.txt"  # of the server of plain TRL

    @property
    def weights_handle(self) -> Path:
        """Where the weights are published; `CUDA_IPC_HANDLE_PATH` overrides it."""
        return Path(os.environ.get("CUDA_IPC_HANDLE_PATH") or self.root / "ps_ipc_handle.json").absolute()

    def stacks(self, name: str) -> Path:
        """Where `server`, `rank1` or `dev1` writes its stacks when asked to (`process.write_stacks_on_signal`)."""
        return self.root / "alive" / f"{name}.stacks"

    def worker_engine(self, worker: WorkerId) -> Path:
        """The folder from which a worker's vLLM is built; it exists only during that, or as long as its server."""
        return self.root / "alive" / f"{worker}.engine"

    def engine_start(self, gpu: str) -> Path:
        """The lock of the worker whose vLLM engine is just starting on this GPU, named as CUDA_VISIBLE_DEVICES does."""
        return self.root / "alive" / f"gpu{gpu}.start"

    def node_log(self, machine: str) -> Path:
        """The last words of another machine's workers."""
        name = re.sub(r"[^A-Za-z0-9.-]", "_", machine)
        return self.root / f"log_node_{name}.txt"

    def worker_log(self, worker: WorkerId) -> Path:
        return self.root / f"log_worker_{worker.number}.txt"

    def server_of_worker_log(self, worker: WorkerId) -> Path:
        """Output of the vLLM server that a worker has started."""
        return self.root / f"log_worker_{worker.number}_vllm_server.txt"

    def where_it_is(self) -> dict[str, Any]:
        """Fields of the state: where directory and process are."""
        return {"run_dir": str(self.root.resolve()), "started_in": str(Path.cwd())}

    def read_state(self, *, accepted: bool = False) -> RunState | None:
        """The contents of `run.json`, or None where there is none.

        Raises `RunDirError` when it is of another format or not the record of a run.

        Args:
            accepted: without the changes of a resume that no server has accepted.
        """
        try:
            data = read_object(self.state_file)
        except FileNotFoundError:
            return None
        except BadFileError as error:
            raise RunDirError(f"{error}. Choose another run directory.") from error
        if data.get("format") != FORMAT:
            raise RunDirError(
                f"{self.state_file} was written by another version of Async-GRPO. "
                "Use that version for it, or choose another run directory."
            )
        try:
            state = shaped(RunState, data)
        except BadFileError as error:
            raise RunDirError(
                f"{self.state_file} is not the record of a run ({error}). Choose another run directory."
            ) from error
        if accepted and state.undo is not None:
            return replace(state, state=state.undo.state, plan=state.undo.plan, undo=None)
        return state

    def has_ended(self) -> bool:
        """Whether the parameter server has written that the run is over."""
        state = self.read_state()
        return state is not None and state.state != RUNNING

    def state_of(self, run_id: str | None) -> RunState:
        """The contents of `run.json`; `RunDirError` where there are none, or another run's (None: any run's)."""
        state = self.read_state()
        if state is None:
            raise RunDirError(f"{self.state_file} has vanished while the run was going on.")
        if run_id is not None and state.run_id != run_id:
            raise RunDirError(f"{self.root} now holds run {state.run_id}; it was run {run_id}'s. Nothing was changed.")
        return state

    def write_state(self, state: RunState) -> None:
        write_json(self.state_file, as_json(state))

    def update_state(self, *, of: str | None = None, **changes: object) -> RunState:
        """Change some fields of `run.json`, if it is still that of the run `of`; returns what is there now."""
        current = self.state_of(of)
        changed = replace(current, **changes)  # type: ignore[arg-type]  # field names are checked by replace()
        self.write_state(changed)
        return changed

    def note_failure(self, run_id: str, why: str) -> None:
        """Write that the run has failed, and why, where its server cannot; a resume is taken back."""
        with suppress(AsyncGRPOError, OSError):
            if not self.take_back_resume(run_id) and self.state_of(run_id).state == RUNNING:
                self.update_state(of=run_id, state=FAILED, why=why[:MOST_OF_A_REASON])

    def take_back_resume(self, run_id: str | None) -> bool:
        """Undo what a resume has changed in `run.json` that was not accepted; False where there is none such."""
        if not self.state_of(run_id).undo:
            return False
        before = self.read_state(accepted=True)
        assert before is not None, "it was read just now"
        self.write_state(before)
        return True
