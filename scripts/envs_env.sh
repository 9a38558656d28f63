#!/usr/bin/env bash
# Creates (or repairs) a virtual environment with the environments of others, verifiers and OpenEnv: scripts/envs_env.sh DIR
# It borrows everything else from .venv, whose tests are to run without these packages.
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1
test -x "$env/bin/python" || .venv/bin/python -m venv "$env"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
printf 'import site; site.addsitedir("%s")\n' "$(site .venv)" > "$(site "$env")/borrowed.pth"
"$env/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "verifiers[ta]" openenv-core
