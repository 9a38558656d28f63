#!/usr/bin/env python3
"""Start `train.py` as a training job with `ModelTrainer` of SageMaker's Python SDK 3. Options: those of launch.py.

    python -m venv sdk3 && sdk3/bin/pip install -r requirements-sdk3.txt
    sdk3/bin/python launch_sdk3.py --image IMAGE --role ROLE --bucket s3://mine/jobs --name sums --dry-run

The SDK appends the time to `--name`. Checkpoints are kept under the name as it is given, so the next job of that name
continues. `--dry-run` needs an account: the SDK asks the service whether the role may train.
"""

import argparse
import os
import sys

import launch
from hyperparameters import Refused
from metrics import METRICS
from sagemaker.core.training.configs import (
    CheckpointConfig,
    Compute,
    InputData,
    MetricDefinition,
    OutputDataConfig,
    StoppingCondition,
)
from sagemaker.train import ModelTrainer


def model_trainer(args: argparse.Namespace) -> ModelTrainer:
    """The job of `launch.build_request`, as the SDK has it. The SDK signs in here."""
    request = launch.build_request(args)
    stopping, checkpoints = request["StoppingCondition"], request["CheckpointConfig"]
    trainer = ModelTrainer(
        training_image=args.image,
        role=args.role,
        base_job_name=args.name,
        compute=Compute(
            instance_type=args.instance,
            instance_count=1,
            volume_size_in_gb=args.volume_gb,
            enable_managed_spot_training=args.spot,
        ),
        stopping_condition=StoppingCondition(
            max_runtime_in_seconds=stopping["MaxRuntimeInSeconds"],
            max_wait_time_in_seconds=stopping.get("MaxWaitTimeInSeconds"),
        ),
        checkpoint_config=CheckpointConfig(s3_uri=checkpoints["S3Uri"], local_path=checkpoints["LocalPath"]),
        output_data_config=OutputDataConfig(s3_output_path=request["OutputDataConfig"]["S3OutputPath"]),
        input_data_config=[InputData(channel_name=name, data_source=uri) for name, uri in args.channel],
        hyperparameters=request["HyperParameters"],
        environment=request["Environment"],
    )
    metrics = [MetricDefinition(name=name, regex=regex) for name, regex in METRICS.items()]
    return trainer.with_metric_definitions(metrics)


def main(command_line: list[str] | None = None) -> int:
    args = launch.arguments(command_line)
    try:
        launch.check(args, launch.build_request(args))
    except Refused as refusal:
        print(f"error: the job would refuse this: {refusal}", file=sys.stderr)
        return 2
    if args.region:
        os.environ["AWS_DEFAULT_REGION"] = args.region  # of the session that the SDK makes
    model_trainer(args).train(wait=False, logs=False, dry_run=args.dry_run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
