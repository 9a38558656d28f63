"""What launch.py and launch_sdk3.py would send, against botocore's model of the service. Nothing is sent.

Runs in an environment of its own (`make test-sagemaker`), because the SDK needs an older rich.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest
from sagemaker.core.helper.session_helper import Session
from sagemaker.train.defaults import TrainDefaults

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "sagemaker"))
import deploy
import launch
import launch_sdk3

ROLE = "arn:aws:iam::123456789012:role/training"
OPTIONS = ["--image", "123456789012.dkr.ecr.us-east-1.amazonaws.com/async-grpo:1", "--bucket", "s3://mine/jobs/"]
OPTIONS += ["--role", ROLE, "--name", "a-job", "--spot", "--channel", "training=s3://mine/data"]
OPTIONS += ["--channel", "index=s3://mine/index"]
OPTIONS += ["--hyperparameter", "max_steps=7"]


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK asks the service for the region, the bucket and the role; here it is answered."""
    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "us-east-1"}
    silent = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
    session = Session(boto_session=boto3.Session(**keys), default_bucket="mine", sagemaker_config=silent)
    monkeypatch.setattr(TrainDefaults, "get_sagemaker_session", lambda sagemaker_session=None: session)
    monkeypatch.setattr(TrainDefaults, "get_role", lambda role=None, sagemaker_session=None: role)


def test_the_request_is_one_that_the_service_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main([*OPTIONS, "--dry-run"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert request["HyperParameters"] == {"num_gpus": "8", "max_steps": "7"}
    request["ResourceConfig"]["InstanceCount"] = "one"
    assert "InstanceCount" in launch.problems(request)


def test_the_requests_for_an_endpoint_are_ones_that_the_service_takes(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*OPTIONS[:2], "--role", ROLE, "--model-data", "s3://mine/model.tar.gz"]
    assert deploy.main([*options, "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"CreateModel", "CreateEndpointConfig", "CreateEndpoint"}


def test_the_sdk_would_send_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    args = launch.arguments(OPTIONS)
    theirs: dict[str, Any] = launch_sdk3.model_trainer(args)._create_training_job_args(boto3=True)
    theirs = {name: value for name, value in theirs.items() if value is not None}
    assert launch.problems(theirs) == ""
    ours = launch.build_request(args)
    assert theirs.pop("TrainingJobName").startswith("a-job-")
    for channel in theirs["InputDataConfig"]:
        assert channel.pop("InputMode") == "File", "as TrainingInputMode of the whole job"
    assert theirs["OutputDataConfig"].pop("CompressionType") == "GZIP", "the service's default"
    assert theirs == {name: value for name, value in ours.items() if name != "TrainingJobName"}


def test_the_dry_run_of_the_sdk_sends_nothing() -> None:
    assert launch_sdk3.main([*OPTIONS, "--dry-run"]) == 0
