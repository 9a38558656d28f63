#!/usr/bin/env bash
# Builds the wheel, installs it away from the checkout, and does two distributed steps with it.
# The wheel's requirements are those of .venv, seen through a .pth file; the editable install there is not.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH

rm -rf "$root/build"  # or what was deleted since would be in the wheel
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder/dist" "$root"
"$python" -m venv --without-pip "$folder/venv"
site=$("$folder/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
"$python" -c 'import site; print(site.getsitepackages()[0])' > "$site/requirements_of_the_checkout.pth"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --disable-pip-version-check --no-deps \
  --force-reinstall "$folder"/dist/async_grpo-*.whl

cd "$folder"
cp "$root/tests/kit/setups/random_model.py" my_trainer.py
installed=$("$folder/venv/bin/python" -c 'import async_grpo, async_grpo_experiments, async_grpo_ipc as ipc; print(async_grpo.__file__, async_grpo_experiments.__file__, ipc.__file__)')
[[ $installed == "$site"/*" $site"/*" $site"/* ]] || { echo "not the wheel, but $installed"; exit 1; }
for file in async_grpo/py.typed async_grpo_experiments/py.typed async_grpo_ipc/py.typed async_grpo/constraints.txt async_grpo/reports/rollouts_page.html; do
  [[ -f $site/$file ]] || { echo "the wheel lacks $file"; exit 1; }
done
venv/bin/async-grpo --version
venv/bin/async-grpo --help > help.txt
venv/bin/async-grpo compare --help > help.txt
if ! venv/bin/async-grpo train my_trainer.py -n 1 --steps 2 > run.txt 2>&1; then cat run.txt; exit 1; fi
venv/bin/async-grpo audit worker | tail -1
echo "the wheel works: $(cd dist && ls ./*.whl)"
