#!/usr/bin/env python3
"""Start `train.py` as a training job of SageMaker.

    python launch.py --image IMAGE --role ROLE --bucket s3://mine/jobs --dry-run

`--dry-run` prints the request, checked against botocore's own model of the service; no account is needed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))  # of a checkout, where it is not installed

import hyperparameters
import train
from metrics import METRICS

# model size -> instance, its GPUs, their memory. The rules: docs/what_fits.md.
INSTANCES = {
    "1.5B": ("ml.g6e.12xlarge", 4, "48 GB"),
    "7B": ("ml.p4de.24xlarge", 8, "80 GB"),
    "14B": ("ml.p5.48xlarge", 8, "80 GB"),
}
NO_ROOT = Path("/nonexistent")  # without a file of the service
OF_INSTANCE = {instance: gpus for instance, gpus, _ in INSTANCES.values()}


def build_request(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of CreateTrainingJob."""
    given = {"num_gpus": str(OF_INSTANCE.get(args.instance, "")), **dict(args.hyperparameter)}
    channels = [
        {
            "ChannelName": name,
            "DataSource": {
                "S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
            },
        }
        for name, uri in args.channel
    ]
    seconds = int(args.hours * 3600)
    stopping = {"MaxRuntimeInSeconds": seconds}
    if args.spot:
        stopping["MaxWaitTimeInSeconds"] = 2 * seconds  # with the time that it waits for an instance
    return {
        "TrainingJobName": args.name,
        "RoleArn": args.role,
        "HyperParameters": given,
        "AlgorithmSpecification": {
            "TrainingImage": args.image,
            "TrainingInputMode": "File",
            "MetricDefinitions": [{"Name": name, "Regex": regex} for name, regex in METRICS.items()],
        },
        **({"InputDataConfig": channels} if channels else {}),
        "OutputDataConfig": {"S3OutputPath": f"{args.bucket}/output"},
        "CheckpointConfig": {"S3Uri": f"{args.bucket}/checkpoints/{args.name}", "LocalPath": "/opt/ml/checkpoints"},
        "ResourceConfig": {"InstanceType": args.instance, "InstanceCount": 1, "VolumeSizeInGB": args.volume_gb},
        "StoppingCondition": stopping,
        "EnableManagedSpotTraining": args.spot,
        "Environment": {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", **_of_the_tracker(given)},
    }


def _of_the_tracker(given: Mapping[str, str]) -> dict[str, str]:
    """The variables of W&B that are set here, for a job that reports to it."""
    names = ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_MODE") if given.get("report_to") == "wandb" else ()
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def shown(request: dict[str, Any]) -> str:
    """The request as it is printed: without the key."""
    hidden = {name: "…" if name.endswith("_KEY") else value for name, value in request["Environment"].items()}
    return json.dumps({**request, "Environment": hidden}, indent=1, ensure_ascii=False)


def check(args: argparse.Namespace, request: dict[str, Any]) -> None:
    """Refuse what the job would refuse, before anything is uploaded. Raises `Refused` with the job's own sentence."""
    texts = [f"--{name}={value}" for name, value in request["HyperParameters"].items()]
    values = hyperparameters.read(texts, {}, NO_ROOT)
    hyperparameters.check_tracker(values, request["Environment"])
    train.check_channels(name for name, _ in args.channel)
    if len({name for name, _ in args.channel}) < len(args.channel):
        raise hyperparameters.Refused("A channel is given twice.")
    train.check_questions(values, {train.CHANNELS[name]: uri for name, uri in args.channel})
    gpus = OF_INSTANCE.get(args.instance)
    if gpus is not None and values.num_gpus > gpus:
        raise hyperparameters.Refused(
            f"num_gpus={values.num_gpus}: {args.instance} has {gpus} GPUs. Leave num_gpus out, or take another "
            "instance."
        )


def problems(request: dict[str, Any], operation: str = "CreateTrainingJob") -> str:
    """What botocore's model of the service says against the request; empty if nothing."""
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.Session().get_service_model("sagemaker")
    shape = model.operation_model(operation).input_shape
    return str(ParamValidator().validate(request, shape).generate_report())


def arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", required=True, help="in ECR, of the Dockerfile here")
    parser.add_argument("--role", required=True, help="ARN of the role that the job runs as")
    parser.add_argument("--bucket", required=True, type=_s3, help="s3://BUCKET/PREFIX of checkpoints and models")
    parser.add_argument("--name", default=f"async-grpo-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--instance", default=INSTANCES["7B"][0])
    parser.add_argument("--spot", action="store_true")
    parser.add_argument("--hours", type=float, default=24.0, help="most hours of training (default: 24)")
    parser.add_argument("--volume-gb", type=int, default=500)
    parser.add_argument("--channel", type=_pair, action="append", default=[], metavar="training=s3://…")
    parser.add_argument("--hyperparameter", type=_pair, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--region", help="default: that of your AWS configuration")
    parser.add_argument("--dry-run", action="store_true", help="print the checked request; send nothing")
    args = parser.parse_args(command_line)
    if args.instance not in OF_INSTANCE and "num_gpus" not in dict(args.hyperparameter):
        parser.error(f"how many GPUs {args.instance} has is not known here: --hyperparameter num_gpus=N")
    return args


def main(command_line: list[str] | None = None) -> int:
    args = arguments(command_line)
    request = build_request(args)
    try:
        check(args, request)
    except hyperparameters.Refused as refusal:
        print(f"error: the job would refuse this: {refusal}", file=sys.stderr)
        return 2
    if wrong := problems(request):
        print(f"error: the service would refuse the request:\n{wrong}", file=sys.stderr)
        return 2
    print(shown(request))
    if args.dry_run:
        print("Nothing was sent.", file=sys.stderr)
        return 0
    import boto3

    answer = boto3.client("sagemaker", region_name=args.region).create_training_job(**request)
    print(answer["TrainingJobArn"], file=sys.stderr)
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def _s3(text: str) -> str:
    if not text.startswith("s3://") or len(text) < 8:
        raise argparse.ArgumentTypeError(f"must begin with s3://, got {text!r}")
    return text.rstrip("/")


if __name__ == "__main__":
    sys.exit(main())
