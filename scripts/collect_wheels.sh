#!/usr/bin/env bash
# Fills a folder with the wheels (about 8 MB) that `scripts/gpu_check.sh --wheels` installs on a machine without a
# network. That machine has torch, cupy, transformers, peft, accelerate, pytest and what those need; what it lacks is
# listed here, and nothing else.
# usage: scripts/collect_wheels.sh FOLDER [PYTHON_VERSION [PACKAGE ...]]      default: 3.12, and what is missing there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:?usage: scripts/collect_wheels.sh FOLDER [PYTHON_VERSION [PACKAGE ...]]}
version=${2:-3.12}
packages=("${@:3}")
python=.venv/bin/python
[[ -x $python ]] || python=python3
((${#packages[@]})) || packages=(trl datasets dill multiprocess loguru crc32c zstandard bm25s math-verify
    latex2sympy2_extended antlr4-python3-runtime torchjd)
platforms=()
for glibc in 2_28 2_27 2_24 2_17 2_5 2_31 2_34; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
for package in "${packages[@]}"; do
    pin=$(grep -m1 "^$package==" src/async_grpo/constraints.txt || echo "$package")
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
        "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$folder" "$pin" ||
        "$python" -m pip wheel -q --no-deps -w "$folder" "$pin" # antlr 4.9 is offered as a source alone, in pure Python
done
du -sh "$folder"
