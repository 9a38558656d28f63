#!/usr/bin/env bash
# Checks that every set of extras resolves together with constraints.txt, without installing anything.
# usage: scripts/check_extras.sh [EXTRAS ...]      default: the sets that docs/versions.md names
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[[ -x $python ]] || python=python3
sets=("$@")
[[ ${#sets[@]} -gt 0 ]] || sets=("" "test,docs,bench,experiments" "cuda12" "cuda13" "cuda12,vllm" "cuda13,vllm" "cuda12,vllm,unsloth")
failed=0
for extras in "${sets[@]}"; do
    name=${extras:+[$extras]}
    if output=$("$python" -m pip install --dry-run --ignore-installed --quiet -c constraints.txt ".${name}" 2>&1); then
        echo "ok      async-grpo$name"
    else
        failed=1
        echo "FAILED  async-grpo$name"
        grep -E "depends on|conflict|requested" <<<"$output" | sort -u | head -12
    fi
done
exit $failed
