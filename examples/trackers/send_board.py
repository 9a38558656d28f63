"""Send the board of a run to W&B or trackio: curves, each worker's curves, samples and settings. Live or afterwards.

    python examples/trackers/send_board.py wandb worker --project sums
    python examples/trackers/send_board.py trackio worker --project sums

Reads the files of the run and changes none. Both clients have the same calls.
"""

import argparse
import importlib
import time
from pathlib import Path

from async_grpo.archive.groups import FinishedGroup, FinishedGroups, UsedStep
from async_grpo.formatting import as_text
from async_grpo.reports import series
from async_grpo.rundir.locks import server_alive

LOOK_EVERY_S = 5.0
COLUMNS = ["step", "which", "reward", "worker", "version", "prompt", "completion"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=["wandb", "trackio"])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--project", required=True)
    parser.add_argument("--group", help="runs of one group are shown together")
    parser.add_argument("--samples-every", type=int, default=10, metavar="N", help="steps (default: 10)")
    args = parser.parse_args(arguments)

    client = importlib.import_module(args.client)
    run = FinishedGroups(args.run_dir)
    config = series.hyperparameter_values(run.hyperparameters)
    client.init(project=args.project, name=f"{args.run_dir.name}-{run.state.run_id}", group=args.group, config=config)
    sent = 0
    while True:
        live = server_alive(args.run_dir)  # before the look, which so sees the last steps
        for news in run.news():
            if isinstance(news, UsedStep) and news.groups:
                client.log(curves(news), step=news.step)
                if news.step % args.samples_every == 0:
                    table = client.Table(columns=COLUMNS, data=samples(news))
                    client.log({"samples": table}, step=news.step)
                sent += 1
        if not live:
            break
        time.sleep(LOOK_EVERY_S)
    client.finish()
    print(f"sent {sent} steps of run {run.state.run_id} to {args.client}, project {args.project}")


def curves(used: UsedStep) -> dict[str, float]:
    """The scalars of the board; those of a worker end in its name. Without what nothing is known of."""
    row = series.scalars(used)
    for worker, scalars in series.of_workers(used.groups).items():
        row |= {f"{tag}/{worker}": value for tag, value in scalars.items()}
    return {tag: value for tag, value in row.items() if value == value}


def samples(used: UsedStep) -> list[list[object]]:
    """The best and the worst completion of a step, as rows of a table."""
    scored = [
        (total, found, index)
        for found in used.groups
        for index, total in enumerate(found.totals.tolist())
        if total == total
    ]
    scored.sort(key=lambda it: it[0])
    chosen = [("worst", scored[0]), ("best", scored[-1])] if scored else []
    return [sample(used.step, which, *it) for which, it in chosen]


def sample(step: int, which: str, reward: float, found: FinishedGroup, index: int) -> list[object]:
    group = found.group
    prompt, completion = as_text(group.prompt(index)), as_text(group.completions[index])
    return [step, which, reward, group.worker, group.policy_version, prompt, completion]


if __name__ == "__main__":
    main()
