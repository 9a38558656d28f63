"""A lease on a version that another process named: both read the same one."""

from pathlib import Path

import pytest
import torch

from async_grpo_ipc import RemoteWeights, ShareTimeoutError, VersionGoneError, WeightExporter, open_remote_memory


def test_a_held_version_is_read_although_a_newer_one_is_there(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(4)}
    with WeightExporter.from_tensors(weights, tmp_path / "handle.json", slots=3) as exporter:
        exporter.publish(1)
        with open_remote_memory(tmp_path / "handle.json") as holder, open_remote_memory(exporter.path) as reader:
            with holder.lease():
                weights["w"].fill_(2.0)
                exporter.publish(2)
                weights["w"].fill_(3.0)
                exporter.publish(3)
                with reader.lease(version=1) as view:
                    assert view.version == 1
                    assert view["w"].eq(0).all()
                assert reader.version == 3


def test_a_version_that_nobody_held_is_gone(published: WeightExporter, remote: RemoteWeights) -> None:
    published.publish(2)
    published.publish(3)
    with pytest.raises(VersionGoneError, match="Version 1 at"), remote.lease(version=1):
        pass


def test_a_version_that_does_not_come_is_a_sentence(remote: RemoteWeights) -> None:
    with pytest.raises(ShareTimeoutError, match="Version 2 could"), remote.lease(0.01, version=2):
        pass
