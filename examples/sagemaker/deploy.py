#!/usr/bin/env python3
"""Serve the model of a job at an endpoint of SageMaker, with an image that has vLLM's server.

    python deploy.py --image IMAGE --role ROLE --model-data s3://mine/jobs/output/NAME/output/model.tar.gz --dry-run

`--dry-run` prints the three requests, checked against botocore's own model of the service; no account is needed.
"""

import argparse
import json
import sys
import time
from typing import Any

import launch

INSTANCE = "ml.g6e.2xlarge"  # one GPU of 48 GB: a model of up to 14 B parameters in bf16
STARTING_S = 1200  # to unpack the model and to load it


def requests(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The arguments of each operation, in their order."""
    variant = {
        "VariantName": "all",
        "ModelName": args.name,
        "InstanceType": args.instance,
        "InitialInstanceCount": 1,
        "ContainerStartupHealthCheckTimeoutInSeconds": STARTING_S,
        "ModelDataDownloadTimeoutInSeconds": STARTING_S,
    }
    container = {
        "Image": args.image,
        "ModelDataUrl": args.model_data,
        "Environment": {"SM_VLLM_MODEL": "/opt/ml/model", "SM_VLLM_MAX_MODEL_LEN": str(args.max_model_len)},
    }
    return {
        "CreateModel": {"ModelName": args.name, "PrimaryContainer": container, "ExecutionRoleArn": args.role},
        "CreateEndpointConfig": {"EndpointConfigName": args.name, "ProductionVariants": [variant]},
        "CreateEndpoint": {"EndpointName": args.name, "EndpointConfigName": args.name},
    }


def arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", required=True, help="in ECR, with vLLM's server for SageMaker")
    parser.add_argument("--role", required=True, help="ARN of the role that the endpoint runs as")
    parser.add_argument("--model-data", required=True, help="model.tar.gz of a job, s3://…")
    parser.add_argument("--name", default=f"async-grpo-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--instance", default=INSTANCE)
    parser.add_argument("--max-model-len", type=int, default=8192, help="tokens of a dialogue (default: 8192)")
    parser.add_argument("--region", help="default: that of your AWS configuration")
    parser.add_argument("--dry-run", action="store_true", help="print the checked requests; send nothing")
    return parser.parse_args(command_line)


def main(command_line: list[str] | None = None) -> int:
    args = arguments(command_line)
    operations = requests(args)
    for operation, request in operations.items():
        if wrong := launch.problems(request, operation):
            print(f"error: the service would refuse {operation}:\n{wrong}", file=sys.stderr)
            return 2
    print(json.dumps(operations, indent=1))
    if args.dry_run:
        print("Nothing was sent.", file=sys.stderr)
        return 0
    import boto3

    client = boto3.client("sagemaker", region_name=args.region)
    client.create_model(**operations["CreateModel"])
    client.create_endpoint_config(**operations["CreateEndpointConfig"])
    print(client.create_endpoint(**operations["CreateEndpoint"])["EndpointArn"], file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
