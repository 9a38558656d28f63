"""The event files that `board` writes, read back with TensorBoard's own reader."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.util.tensor_util import make_ndarray

from async_grpo.cli import main
from async_grpo.cli.inspect import board as board_command
from async_grpo.errors import DiskFullError, RunDirError, UsageError
from async_grpo.reports.board import Board, BoardKeptError
from kit.archived_run import HOSTILE, RUN, ArchivedRun, three_steps
from kit.scripts import module_at


def events_of(run: ArchivedRun, folder: str = "run") -> EventAccumulator:
    sizes = {"scalars": 0, "histograms": 0, "text": 0}
    events = EventAccumulator(str(run.run.board / folder), tensor_size_guidance=sizes)
    events.Reload()
    return events


def series(run: ArchivedRun, tag: str, folder: str = "run") -> list[tuple[int, Any]]:
    """(step, value) of a tag, as TensorBoard sees it."""
    return [(it.step, make_ndarray(it.tensor_proto).tolist()) for it in events_of(run, folder).Tensors(tag)]


def steps(run: ArchivedRun, tag: str = "1_rewards/total") -> list[int]:
    return [step for step, _ in series(run, tag)]


def tags(run: ArchivedRun) -> set[str]:
    return set(events_of(run).Tags()["tensors"])


def make_board(run: ArchivedRun) -> tuple[int, int, int]:
    """Steps, logged lines and missing groups of a board that is made whole."""
    with Board(run.root) as board:
        return board.update()


def test_a_critic_has_no_advantages_of_groups(run: ArchivedRun) -> None:
    run.run.hyperparameters.write_text(json.dumps({"advantages": "critic"}))
    make_board(run)
    assert "8_distributions/rewards" in tags(run) and "8_distributions/advantages" not in tags(run)


def test_everything_is_there(run: ArchivedRun) -> None:
    run.run.hyperparameters.write_text(json.dumps({"reward_weights": [1, 2], "trainer": {"learning_rate": 0.1}}))
    assert make_board(run) == (3, 3, 0)
    whole = {
        "1_rewards/total": [1.5, 1.5, 1.5],
        "1_rewards/right": [0.5, 0.5, 0.5],
        "2_staleness/mean": [0.0, 1.0, 1.0],
        "6_timing/job_age_versions": [0.0, 1.0, 2.0],
        "train/loss": [0.5, 0.5, 0.5],
    }
    assert {tag: series(run, tag) for tag in whole} == {tag: [*enumerate(it, 1)] for tag, it in whole.items()}
    first = {"5_completions/length": 2.5, "6_timing/generation_s": 0.5, "3_throughput/tokens_per_second": 20.0}
    assert {tag: series(run, tag)[0] for tag in first} == {tag: (1, value) for tag, value in first.items()}
    assert series(run, "7_workers/groups", "dev2") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert series(run, "7_workers/tokens_per_generating_second", "dev1")[0] == (1, 10.0)
    assert not any("monotonic" in tag for tag in tags(run))
    histograms = {"rewards", "advantages", "staleness", "completion_length"}
    assert {f"8_distributions/{name}" for name in histograms} <= tags(run)
    assert b"trainer.learning_rate | 0.1" in series(run, "hyperparameters")[0][1]
    ((_, best), *_), ((_, worst), *_) = series(run, "5_completions/best"), series(run, "5_completions/worst")
    assert b"good reply" in best and b"bad reply" in worst and b"question" in best


def test_the_groups_of_curves_come_in_the_order_in_which_they_are_asked_for(run: ArchivedRun) -> None:
    """TensorBoard sorts them by name."""
    run.log(3, eval_success_rate=0.5, eval_version=2)  # training has gone on meanwhile
    for name, reward in (("math", 0.25), ("code", 0.75)):  # as TRL evaluates a dictionary of datasets
        run.log(3, eval_set=name, eval_reward=reward)
    make_board(run)
    order = list(dict.fromkeys(tag.partition("/")[0] for tag in sorted(tags(run)) if "/" in tag and tag[0] != "_"))
    assert order[:4] == ["1_rewards", "2_staleness", "3_throughput", "4_evaluation"]
    assert series(run, "4_evaluation/success_rate") == [(2, 0.5)]
    assert [series(run, f"4_evaluation/{name}/reward") for name in ("math", "code")] == [[(3, 0.25)], [(3, 0.75)]]
    assert "4_evaluation/version" not in tags(run)


def test_how_far_the_policy_is_from_its_rollouts_is_one_group_of_curves(run: ArchivedRun) -> None:
    figures = {"effective_sample_size": 0.9, "ess_sequences": 0.5, "kl_to_sampler": 0.25}
    run.log(3, **{f"async/{name}": value for name, value in figures.items()})
    make_board(run)
    assert {name: series(run, f"9_stability/{name}") for name in figures} == {
        name: [(3, pytest.approx(value))] for name, value in figures.items()
    }


def test_settings_and_newest_figures_of_runs_are_compared_in_the_hparams_tab(tmp_path: Path) -> None:
    run = three_steps(tmp_path, state="finished")
    settings = {"model": "m", "run": {"max_staleness": 2, "steps": None}, "reward_weights": [1, 2]}
    trainer = {"learning_rate": 0.1, "hub_token": "hf_abcdefghijklmnopqrstuvwxyzabcdefgh"}
    run.run.hyperparameters.write_text(json.dumps({**settings, "trainer": trainer}))
    with Board(run.root) as board:
        board.update()
        board.update()
    events = events_of(run)
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    start = metadata.parse_session_start_info_plugin_data(content)
    assert start.group_name and start.hparams["learning_rate"].number_value == 0.1
    assert start.hparams["max_staleness"].number_value == 2
    assert start.hparams["reward_weights"].string_value == "[1, 2]"
    assert "steps" not in start.hparams and "hf_" not in str(start)
    content = events.SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.content
    assert metadata.parse_session_end_info_plugin_data(content).status == Status.STATUS_SUCCESS


def test_rewards_that_are_not_finite_are_left_out_of_the_curves(tmp_path: Path) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0, 1], rewards=((math.inf, 0.5), (0.0, 0.5)))
    run.use(2, [2], rewards=((-math.inf, 0.5), (math.inf, math.nan)))
    assert make_board(run) == (2, 2, 0)
    assert series(run, "1_rewards/format") == [(1, 0.5), (2, 0.5)]
    ((_, histogram),) = series(run, "8_distributions/rewards")
    assert sum(count for _, _, count in histogram) == 2


def test_a_second_look_adds_only_what_is_new(run: ArchivedRun) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.run.board.rglob("*") if path.is_file()}

    with Board(run.root) as board:
        board.update()
        before = files()
        assert (board.update(), files()) == ((0, 0, 0), before)
        run.use(4, [6])
        assert board.update() == (1, 1, 0)
    assert steps(run) == steps(run, "train/loss") == [1, 2, 3, 4]


def test_a_second_board_is_made_whole_in_place_of_the_first(run: ArchivedRun) -> None:
    make_board(run)
    (run.run.board / "run" / "notes.txt").write_text("of the user")
    (events,) = (run.run.board / "run").glob("events.*")
    with events.open("ab") as file:
        file.write(b"half a record")  # as a crash leaves it
    run.use(4, [6])
    assert make_board(run) == (4, 4, 0)
    assert steps(run) == [1, 2, 3, 4]
    for _ in range(3):
        with Board(run.root) as board:
            board.update()
    sizes = [path.stat().st_size for path in sorted((run.run.board / "dev1").glob("events.*"))]
    assert len(sizes) == 2 and sizes[0] == 0 < sizes[1], "the one before is emptied, older ones are deleted"
    assert (run.run.board / "run" / "notes.txt").read_text() == "of the user"


def test_a_reader_of_the_first_board_sees_the_second_in_its_place(run: ArchivedRun) -> None:
    make_board(run)
    events = events_of(run)
    run.begin(1)
    make_board(run)
    events.Reload()
    assert [it.step for it in events.Tensors("1_rewards/total")] == [1]


def test_a_full_disk_is_a_sentence_and_the_next_look_makes_the_board_whole(
    run: ArchivedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, record: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Board(run.root) as board:
        with monkeypatch.context() as patch:
            patch.setattr("async_grpo.reports.board.RecordWriter.write", full)
            with pytest.raises(DiskFullError, match="disk is full"):
                board.update()
        assert board.update() == (3, 3, 0)
    assert steps(run) == [1, 2, 3]


def test_what_a_resumed_run_took_back_is_taken_off_the_board(run: ArchivedRun) -> None:
    with Board(run.root) as board:
        board.update()
        run.begin(1)
        run.use(2, [7], rewards=((3.0, 0.0), (3.0, 0.0)))
        board.update()
    assert series(run, "1_rewards/total") == [(1, 1.0), (2, 3.0)]


def test_a_resume_between_two_looks_shows_its_own_metrics(run: ArchivedRun) -> None:
    run.begin(1)
    run.log(1, resumed=True)
    run.use(2, [7])
    make_board(run)
    assert steps(run, "train/loss") == [1, 2]


def test_groups_that_made_room_are_counted(run: ArchivedRun) -> None:
    for file in (run.root / "done").rglob("000000000[012]*"):
        file.unlink()
    assert make_board(run) == (3, 3, 3)
    assert steps(run) == [2, 3]


def test_hostile_text_stays_in_its_block(tmp_path: Path) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0], completions=[HOSTILE + "\n```\n# heading\n", "x"], prompt=HOSTILE)
    make_board(run)
    ((_, shown),) = series(run, "5_completions/best")
    lines = [line for line in shown.decode().split("\n") if "script" in line or "heading" in line or "`" in line]
    assert lines != [] and all(line.startswith("    ") for line in lines)
    assert "\x00" not in shown.decode() and "\x1b" not in shown.decode()


def test_a_run_without_steps_and_then_with(tmp_path: Path) -> None:
    run = ArchivedRun(tmp_path)
    with Board(run.root) as board:
        assert board.update() == (0, 0, 0)
        run.use(1, [0])
        assert board.update() == (1, 1, 0)


def test_one_process_keeps_a_board_and_the_second_is_told_who(run: ArchivedRun) -> None:
    with Board(run.root):
        with pytest.raises(BoardKeptError, match=r"kept up to date by another process .* --serve"):
            Board(run.root)
    Board(run.root).update()


def test_another_run_in_the_same_folder_is_a_sentence(run: ArchivedRun) -> None:
    with Board(run.root) as board:
        board.update()
        run.run.update_state(run_id="another")
        with pytest.raises(RunDirError):
            board.update()


def test_files_are_private(run: ArchivedRun) -> None:
    make_board(run)
    assert {oct(path.stat().st_mode & 0o777) for path in run.run.board.rglob("events*")} == {"0o600"}
    assert run.run.board.stat().st_mode & 0o777 == 0o700


def test_the_command_says_where_and_how_to_see_it(
    run: ArchivedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["board", str(run.root)]) == 0
    shown = capsys.readouterr().out
    assert f"{run.run.board}: 3 steps and 3 logged lines" in shown
    assert re.search(rf"board {run.root} --serve", shown) and f"--logdir {run.run.board}" in shown
    assert main(["board", str(tmp_path)]) == 0  # no run, but event files below it
    assert "is not a run directory, but holds event files" in capsys.readouterr().out
    assert main(["board", str(tmp_path / "nowhere")]) == 2
    assert "does not exist, so no run has begun there" in capsys.readouterr().err


def test_several_runs_are_shown_side_by_side_under_names_that_tell_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    roots = [three_steps(tmp_path / name).root for name in ("a", "b")]
    served: list[set[str]] = []

    def serve(folder: Path, port: int, shown: object) -> int:
        found = (Path(path) for path, _, files in os.walk(folder, followlinks=True) if files)
        served.append({str(path.relative_to(folder)) for path in found})
        return 0

    monkeypatch.setattr(board_command, "_serve", serve)
    assert main(["board", *map(str, roots), "--serve"]) == 0
    assert {f"{name}/worker/{of}" for name in "ab" for of in ("run", "dev1", "dev2")} <= served[0]
    monkeypatch.chdir(tmp_path / "a")
    assert main(["board", "worker", str(roots[1]), "worker"]) == 0
    assert f"board worker {roots[1]} --serve" in capsys.readouterr().out
    assert main(["board", "worker", str(roots[0]), "../a/worker", "--serve"]) == 0, "one run in three spellings"
    assert {"run", "dev1", "dev2"} <= served[1]


def test_a_taken_port_is_a_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot use port"):
            board_command.start_tensorboard(tmp_path, taken.getsockname()[1])


@pytest.mark.parametrize(
    ("answer", "hosts"),
    [
        ("200 OK", ["127.0.0.1:6006", "LOCALHOST", "localhost:16006"]),  # the last at the other end of a tunnel
        ("403 Forbidden", ["attacker.example:6006", "127.0.0.1.attacker.example", "localhost:6006@attacker.example"]),
        ("403 Forbidden", ["0.0.0.0:6006", ""]),
    ],
)
def test_the_page_is_served_under_our_own_names_only(answer: str, hosts: list[str]) -> None:
    """A page of the web whose name leads to 127.0.0.1 (DNS rebinding) reads nothing."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        start_response("200 OK", [])
        return [b"the run"]

    guarded, answers = board_command.only_for_this_machine(app), list[str]()
    for host in hosts:
        body = b"".join(guarded({"HTTP_HOST": host}, lambda status, headers: answers.append(status)))
        assert answers.pop() == answer and (body == b"the run") == (answer == "200 OK"), host


# --- `examples/trackers/send_board.py`: --------------------------------------------------------------------------

SCRIPT = Path(__file__).parents[3] / "examples" / "trackers" / "send_board.py"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_curves_workers_samples_and_settings(
    name: str, run: ArchivedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.run.hyperparameters.write_text(json.dumps({"trainer": {"learning_rate": 0.1}}))
    begun: dict[str, Any] = {}
    logged: list[tuple[int, dict[str, Any]]] = []
    client = SimpleNamespace(
        log=lambda row, step: logged.append((step, row)),
        Table=lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data],
        finish=lambda: begun.update(finished=True),
    )
    client.init = lambda **given: begun.update(given)
    monkeypatch.setitem(sys.modules, name, client)
    module_at(SCRIPT).main([name, str(run.root), "--project", "sums", "--samples-every", "3"])
    assert begun["project"] == "sums" and begun["name"] == f"worker-{RUN}" and begun["finished"]
    assert begun["config"]["learning_rate"] == 0.1
    assert [step for step, _ in logged] == [1, 2, 3, 3]
    curves = logged[2][1]
    assert curves["1_rewards/total"] == 1.0 and curves["7_workers/reward/dev2"] == 1.0
    assert not any(math.isnan(value) for value in curves.values())
    worst, best = logged[3][1]["samples"]
    assert worst["completion"].startswith("bad reply") and best["completion"].startswith("good reply")
    assert best["prompt"].startswith("question") and best["which"] == "best"
