#!/usr/bin/env bash
# Creates (or repairs) a virtual environment with packages that .venv does not have, or has in another version, and
# borrows everything else from it: scripts/env_beside.sh DIR PACKAGE…  VENV names another one than .venv.
# What is named here is not held to its version in constraints.txt if it states one itself.
set -euo pipefail
cd "$(dirname "$0")/.."
from=${VENV:-.venv}
env=$1
shift
test -x "$env/bin/python" || "$from/bin/python" -m venv "$env"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
printf 'import site; site.addsitedir("%s")\n' "$(site "$from")" > "$(site "$env")/borrowed.pth"
cp src/async_grpo/constraints.txt "$env/constraints.txt"
for package in "$@"; do
  case $package in *[=\<\>]*) sed -i "/^${package%%[=<>]*}==/d" "$env/constraints.txt" ;; esac
done
"$env/bin/python" -m pip install --quiet --disable-pip-version-check -c "$env/constraints.txt" "$@"
