"""`python stand_in.py YARD STAGE PARTIAL INPUT…`: writes the hash of its name and of its inputs, as a stage does."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

from async_grpo_experiments.runner import states


def main(yard: Path, stage: str, partial: Path, inputs: list[Path]) -> None:
    digest = hashlib.sha256(stage.encode())
    for folder in inputs:
        manifest = states.manifest_of(folder)
        assert manifest is not None, f"{folder} is not there"
        digest.update(states.digest(manifest).encode())
    (partial / "made").write_text("half")
    fault = yard / f"{stage}.fault"
    how = fault.read_text() if fault.exists() else ""
    if how:
        fault.unlink()
    work = states.work_of(partial)
    work.mkdir(exist_ok=True)
    (work / "checkpoint").write_text("1")
    if how.startswith("code "):
        sys.exit(int(how.split()[1]))
    if how == "exit":
        sys.exit("error: no luck")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        (yard / f"{stage}.hangs").write_text(str(os.getpid()))
        signal.pause()
    if how == "kill-runner":
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    (partial / "made").write_text(digest.hexdigest())
    if how == "kill-manifest":
        states._give_name = lambda partial: os.kill(os.getppid(), signal.SIGKILL) or signal.pause()
        with (yard / "counter").open("a") as counter:
            counter.write(f"{stage}\n")
    states.finish(partial)
    with (yard / "counter").open("a") as counter:
        counter.write(f"{stage}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), [Path(one) for one in sys.argv[4:]])
