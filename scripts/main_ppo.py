"""Train with the keys that users of verl have: `async-grpo train` under the name of verl's command.

    python scripts/main_ppo.py data.train_files=math.parquet actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct
    python scripts/main_ppo.py data.train_files="{'math':'m.parquet','logic':'l.parquet'}" mtl.method=pcgrad ...
    python scripts/main_ppo.py KEY=VALUE ... --dry-run

docs/ppo.md has the keys. Checkpoints go to trainer.default_local_dir, with setup/, a setup file that names all keys,
and run/, the run directory; `async-grpo train --resume --run-dir`, `replay`, `audit` and `doctor` work on them. All
options, from the first on, are those of `async-grpo train`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from async_grpo.api.options import as_flags
from async_grpo.cli import main
from async_grpo.errors import AsyncGRPOError, UsageError
from async_grpo.rundir.lifecycle import is_over
from async_grpo.rundir.paths import FINISHED
from async_grpo.setup.devices import visible_gpus


def command(arguments: list[str]) -> list[str] | None:
    """The arguments of `async-grpo`; None: there is nothing to do."""
    from async_grpo.verl_keys import Keys, planned
    from async_grpo.verl_keys.run import run_dir, watch_of

    first = next((index for index, text in enumerate(arguments) if text.startswith("-")), len(arguments))
    keys, options = arguments[:first], arguments[first:]
    given = {option.partition("=")[0] for option in options}
    if "--run-dir" in given:
        raise UsageError("The run directory is the folder run in trainer.default_local_dir: give that key.")
    run = planned(Keys.read(keys), visible_gpus)
    print("\n".join(run.lines), flush=True)
    may_continue = run.keys["trainer.resume_mode"] == "auto" and not given & {"--dry-run", "--overwrite", "--resume"}
    directory = run_dir(run.keys)
    if may_continue and (state := directory.read_state(accepted=True)):
        if reason := watch_of(run.keys).reason_to_stop():
            print(f"nothing to do: the run in {directory.root} stopped early, as {reason}")
            return None
        if state.state == FINISHED or not is_over(state):
            options = ["--resume", *options]
    run.write()
    of_run = ["--distributed", f"--run-dir={directory.root}", *as_flags(run.options)]
    return ["train", str(run.setup_file), *of_run, *options]


def start(arguments: list[str]) -> int:
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return 0
    try:
        of_train = command(arguments)
    except AsyncGRPOError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if of_train is None else main(of_train)


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
