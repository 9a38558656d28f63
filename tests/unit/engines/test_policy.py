"""A worker aliases weights on its own device, and copies those of another one, each version once."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from async_grpo.engines.continuous import ContinuousEngine
from async_grpo.engines.policy import PolicyWeights
from async_grpo.errors import PeerDiedError
from async_grpo_ipc import RemoteWeights, WeightExporter, open_remote_memory
from kit.worker_fakes import FakeEngine


def test_on_its_own_device_it_moves_no_byte(tmp_path: Path) -> None:
    trained, worker = nn.Linear(3, 2), nn.Linear(3, 2)
    with WeightExporter.from_model(trained, tmp_path / "handle.json") as exporter:
        exporter.publish(1)
        with open_remote_memory(tmp_path / "handle.json") as remote:
            policy = PolicyWeights(remote, worker)
            assert policy.adopt() == 1
            torch.testing.assert_close(worker.weight, trained.weight)
            first = worker.weight.data_ptr()
            remote.release()
            with torch.no_grad():
                trained.weight.fill_(7.0)
            exporter.publish(2)
            assert policy.adopt() == 2
            assert worker.weight.data_ptr() != first, "another slot"
            assert worker.weight.eq(7.0).all()


def test_from_another_device_it_copies_each_version_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteWeights, "can_alias", lambda *_: False)
    pulls: list[int] = []
    real_pull = RemoteWeights.pull

    def counted(self: RemoteWeights, model: nn.Module, timeout_s: float) -> int:
        pulls.append(real_pull(self, model, timeout_s))
        return pulls[-1]

    monkeypatch.setattr(RemoteWeights, "pull", counted)
    trained, worker = nn.Linear(3, 2), nn.Linear(3, 2)
    own_memory = worker.weight.data_ptr()
    with WeightExporter.from_model(trained, tmp_path / "handle.json") as exporter:
        exporter.publish(1)
        with open_remote_memory(tmp_path / "handle.json") as remote:
            policy = PolicyWeights(remote, worker)
            assert [policy.adopt(), policy.adopt()] == [1, 1]
            exporter.publish(2)
            assert policy.adopt() == 2
    assert pulls == [1, 2]
    assert worker.weight.data_ptr() == own_memory
    torch.testing.assert_close(worker.weight, trained.weight)


def test_a_version_of_the_next_trainer_is_another_one_although_its_number_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that continues from a checkpoint comes to the numbers that the killed one had reached, by other
    steps. A worker that has had no job meanwhile first looks then.
    """
    monkeypatch.setattr(RemoteWeights, "can_alias", lambda *_: False)
    trained, worker = nn.Linear(3, 2), nn.Linear(3, 2)
    with WeightExporter.from_model(trained, tmp_path / "handle.json") as first:
        first.publish(7)
        remote = open_remote_memory(first.path)
        policy, fake = PolicyWeights(remote, worker), FakeEngine(versions_at_once=4)
        engine = ContinuousEngine(fake, group_size=1)  # type: ignore[arg-type]
        engine.follow(remote)
        assert (policy.adopt(), engine.adopt()) == (7, 7)
    with torch.no_grad():
        trained.weight.fill_(7.0)
    with remote, WeightExporter.from_model(trained, tmp_path / "handle.json") as second:
        second.publish(7)
        assert engine.adopt(in_use={7}) is None, "adapters are told apart by their numbers"
        assert (policy.adopt(), engine.adopt()) == (7, 7)
        assert worker.weight.eq(7.0).all()
        assert [version for version, _ in fake.loads] == [7, 7]


def test_a_dead_trainer_is_told(tmp_path: Path) -> None:
    worker = nn.Linear(3, 2)
    exporter = WeightExporter.from_model(nn.Linear(3, 2), tmp_path / "handle.json")
    with open_remote_memory(tmp_path / "handle.json") as remote:
        exporter.close()
        with pytest.raises(PeerDiedError):
            PolicyWeights(remote, worker).adopt()


def test_the_models_own_memory_is_given_back_once_it_is_aliased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps what a loaded model had: on a GPU each worker would reserve the model's bytes once more."""
    worker = nn.Linear(3, 2)
    own = weakref.ref(worker.weight.untyped_storage())
    seen: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(own() is None))
    with WeightExporter.from_model(nn.Linear(3, 2), tmp_path / "handle.json") as exporter:
        exporter.publish(1)
        with open_remote_memory(tmp_path / "handle.json") as remote:
            policy = PolicyWeights(remote, worker)
            policy.adopt()
            assert seen == [True], "emptied when nothing referred to the model's own weights any more"
            exporter.publish(2)
            policy.adopt()
            assert len(seen) == 1, "once: emptying waits for the GPU"
