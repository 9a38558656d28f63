"""What the exit of a worker means for the run: started again, given up, or the end of the run."""

from __future__ import annotations

import json

import pytest
from stage import FOLLOW_THE_RUN, FOR_EVER, Stage

from async_grpo.launch import launcher
from async_grpo.launch.supervisor import Exit

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_a_worker_that_dies_is_started_again_while_the_run_goes_on(stage: Stage) -> None:
    stage.children_are(
        server=f"""
            summary = {{"server_pid": os.getpid(), "state": "finished", "run_id": "x"}}
            (RUN / "summary.json").write_text(json.dumps(summary))
            until(lambda: started("worker1") == 3)
            {"end_run('finished')"}
        """,
        worker=f"""
            if ROLE == "worker1" and started(ROLE) < 3:
                os.kill(os.getpid(), signal.SIGKILL)
            {FOLLOW_THE_RUN}
        """,
    )
    assert stage.launch() == 0
    assert len(stage.starts("worker2")) == 1
    assert stage.said().out.count("worker 1 ended (killed by SIGKILL); starting it again") == 2
    assert '"worker_restarts": 2' in stage.run.summary.read_text()


def test_workers_that_keep_dying_are_given_up_after_five_restarts_with_their_last_words(stage: Stage) -> None:
    stage.children_are(server=FOR_EVER, worker='sys.exit("error: no model")')
    assert stage.launch() == 1
    assert len(stage.starts("worker1")) == len(stage.starts("worker2")) == 1 + 5
    captured = stage.said()
    why = "[launcher] gave up: every worker failed 6 times in a row. The last words of log_worker_1.txt:"
    assert captured.err == f"{why}\nerror: no model\n"
    assert stage.run.state_of(None).why == "every worker failed 6 times in a row: no model"


def test_a_worker_that_dies_at_the_end_is_in_the_summary(stage: Stage) -> None:
    stage.children_are(
        server="""
            until(lambda: started("worker1") and started("worker2"))
            (RUN / "summary.json").write_text(json.dumps({"server_pid": os.getpid()}))
            end_run("finished")
        """,
        worker=f"""
            {FOLLOW_THE_RUN}
            if ROLE == "worker2":
                os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert stage.launch() == 0
    assert json.loads(stage.run.summary.read_text())["workers_lost"] == ["worker 2 (killed by SIGKILL)"]


def test_a_worker_that_refuses_its_setup_ends_the_run_at_once_with_its_words_and_a_checkpoint(stage: Stage) -> None:
    stage.children_are(
        server="""
            stop_when_asked((RUN / "checkpoint").touch)
            (HERE / "ready").touch()
            until(lambda: False)
        """,
        worker="""
            if ROLE == "worker1": until(lambda: False)
            until((HERE / "ready").exists)
            print("noise\\nerror: use_vllm=True: vLLM is not installed here", file=sys.stderr)
            sys.exit(2)
        """,
    )
    assert stage.launch() == 2
    assert (stage.run.root / "checkpoint").exists()
    assert len(stage.starts("worker2")) == 1, "it would say the same again"
    captured = stage.said()
    assert "worker 2 rejected its setup, so the run ends" in captured.out
    assert "Fix the error reported by worker 2, then continue: " in captured.out and "--resume" in captured.out
    assert stage.run.state_of(None).why == "worker 2: use_vllm=True: vLLM is not installed here"
    assert captured.err == "error: use_vllm=True: vLLM is not installed here\n"


def test_a_refusal_before_training_is_told_to_start_again(stage: Stage) -> None:
    stage.children_are(
        server="""
            stop_when_asked(step=0)
            (HERE / "ready").touch()
            until(lambda: False)
        """,
        worker='until((HERE / "ready").exists)\nsys.exit(2)',
    )
    assert stage.launch() == 2
    assert ", then start again\n" in stage.said().out


def test_one_worker_that_is_given_up_does_not_end_the_run_of_the_others(stage: Stage) -> None:
    stage.children_are(
        server='until(lambda: started("worker1") == 6); time.sleep(0.2); end_run("finished")',
        worker=f'if ROLE == "worker1": sys.exit(1)\n{FOLLOW_THE_RUN}',
    )
    assert stage.launch() == 0
    assert len(stage.starts("worker1")) == 6


def test_a_worker_that_hangs_on_a_job_is_killed_and_started_again(stage: Stage) -> None:
    stage.children_are(
        server='until(lambda: started("worker1") == 2); end_run("finished")',
        worker=f"""
            if started(ROLE) == 1:
                from async_grpo.telemetry.activity import activity
                activity.publish(RUN, "dev1", device="cpu", run_id="x", state="loading", stall_after_s=60)
                activity.has_jobs([1], "generating")
                until(lambda: False)
            {FOLLOW_THE_RUN}
        """,
        flags="",
    )
    assert stage.launch(worker_devices=("cpu",), worker_timeout=0.2) == 0
    out = stage.said().out
    assert "killing worker 1: no progress for 0.2 s; it was generating group 1 for " in out
    assert "worker 1 ended (killed by SIGKILL); starting it again" in out


def test_no_worker_is_started_again_when_the_server_has_said_that_the_run_is_over(stage: Stage) -> None:
    stage.children_are(
        server="""
            until(lambda: started("worker1") and started("worker2"))
            end_run("finished")
            (HERE / "said").touch()
            for role in ("worker1", "worker2"):
                pid = json.loads((HERE / ("starts_" + role)).read_text())[0]
                until(lambda: not Path(f"/proc/{pid}").exists())
            time.sleep(0.2)
        """,
        worker='until((HERE / "said").exists); sys.exit(1)',
    )
    assert stage.launch() == 0
    assert len(stage.starts("worker1")) == len(stage.starts("worker2")) == 1


def test_where_server_and_workers_refuse_the_same_setup_the_server_s_words_count(stage: Stage) -> None:
    run = launcher._Launch(stage.plan(), stage.run, "any")
    refusals = {name: Exit(launcher.REFUSED, 4711, starts=1) for name in ("server", "worker 1", "worker 2")}
    assert run._is_over(refusals)
    assert not run._refused(refusals) and not run._all_gave_up(refusals)
    del refusals["server"]
    assert run._is_over(refusals) and run._refused(refusals) == "worker 1"


def test_a_worker_that_ends_the_run_later_is_named_with_the_sentence_of_both(stage: Stage) -> None:
    stage.children_are(
        server="""
            until(lambda: started("worker1"))
            (RUN / "refused.json").write_text(json.dumps({"worker": "dev1", "why": "no optimizer"}))
            end_run("failed")
            print("error: no optimizer", file=sys.stderr)
            sys.exit(2)
        """,
        worker=FOLLOW_THE_RUN,
    )
    assert stage.launch() == 2
    captured = stage.said()
    assert "dev1 cannot do what the setup file asks for, so the run ends" in captured.out
    assert captured.err == "error: no optimizer\n"
