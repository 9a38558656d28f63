"""A stand-in for SLURM on this machine, `python slurm_stand_in.py PROGRAM …`. Its jobs are in $FAKE_SLURM."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

JOBS = Path(os.environ["FAKE_SLURM"])


def job(number: str) -> dict[str, str]:
    return json.loads((JOBS / number).read_text())


def put(number: str, **changes: str) -> None:
    part = JOBS / f".{number}.part"
    part.write_text(json.dumps({**(job(number) if (JOBS / number).exists() else {}), **changes}))
    part.rename(JOBS / number)


def jobs() -> list[tuple[str, dict[str, str]]]:
    return [(path.name, job(path.name)) for path in JOBS.iterdir() if path.name.isdecimal()]


def sbatch(script: str) -> None:
    number = str(os.getpid())  # submitit remembers the numbers of other tests
    text = Path(script).read_text()
    name = re.search(r"#SBATCH --job-name=(\S+)", text)
    assert name is not None
    put(number, name=name[1], state="RUNNING", script=text)
    (JOBS / f"{number}.sh").write_text(text)
    nothing = subprocess.DEVNULL  # who called waits for the end of what is printed
    subprocess.Popen([sys.executable, __file__, "run", number], start_new_session=True, stdout=nothing, stderr=nothing)
    print(f"Submitted batch job {number}")


def run(number: str) -> None:
    """Be the job's node. It runs again where `scontrol requeue` has asked for it."""
    env = {**os.environ, "SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    while True:
        child = subprocess.Popen(["bash", str(JOBS / f"{number}.sh")], env=env, start_new_session=True)
        put(number, pid=str(child.pid))
        child.wait()
        if not (JOBS / f"{number}.requeue").exists():
            break
        (JOBS / f"{number}.requeue").unlink()
    put(number, state="COMPLETED" if child.returncode == 0 else "FAILED")


def srun(*arguments: str) -> None:
    command = list(arguments)
    while command[0].startswith("--"):
        option = command.pop(0)
        if option == "--output":
            path = command.pop(0).replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", "0")
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            os.dup2(1, 2)
    os.execvp(command[0], command)


def squeue(*options: str) -> None:
    wanted = next(one for one in options if one.startswith("--name=")).removeprefix("--name=").split(",")
    print(*(found["name"] for _, found in jobs() if found["name"] in wanted and found["state"] == "RUNNING"), sep="\n")


def scancel(*options: str) -> None:
    names = [one.removeprefix("--name=") for one in options if one.startswith("--name=")]
    signals = [options[index + 1] for index, one in enumerate(options) if one == "--signal"]
    for number, found in jobs():
        if (number in options or found["name"] in names) and found["state"] == "RUNNING" and "pid" in found:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(found["pid"]), signal.Signals[f"SIG{signals[0].removeprefix('SIG')}"] if signals else 15)
            if not signals:
                time.sleep(0.05)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(found["pid"]), signal.SIGKILL)


def sacct(*options: str) -> None:
    print("JobID|State|NodeList")
    for number, found in jobs():
        if number in options:
            print(f"{number}|{found['state']}|here")


def scontrol(what: str, number: str) -> None:
    assert what == "requeue"
    (JOBS / f"{number}.requeue").touch()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
