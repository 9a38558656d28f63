#!/usr/bin/env bash
# Packs vLLM for a machine with CUDA and without a network: what one dense model needs on an H100 or H200, and what
# vLLM imports that such a machine lacks. Whatever carries it there may take it piece by piece: `scripts/gpu_check.sh
# --vllm FOLDER` checks the pieces, joins them, and unpacks them once.
# usage: scripts/pack_vllm.sh [FOLDER [PYTHON_VERSION]]      default: .gpu/vllm, which git ignores, and 3.12
#
# 0.26.0 is the newest vLLM for torch 2.11.0. Of the others these are what `from vllm import LLM`, the second model
# runner, attention and LoRA import, at versions that suit it. A machine with torch, transformers and cupy has the rest.
set -euo pipefail
folder=$(realpath -m "${1:-"$(dirname "$0")/../.gpu/vllm"}")
version=${2:-3.12}
cd "$(dirname "$0")/.."
root=$PWD
python=$root/.venv/bin/python
[[ -x $python ]] || python=python3
packages=(vllm==0.26.0 annotated-types==0.8.0 apache-tvm-ffi==0.1.10 cachetools==8.0.2 cbor2==6.3.0 distro==1.9.0
    fastapi==0.136.3 llguidance==1.7.6 msgspec==0.22.0 openai==2.54.0 openai-harmony==0.0.8
    partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pydantic==2.14.4 pydantic-core==2.50.5 pyzmq==27.3.0
    sniffio==1.3.1 starlette==1.10.0 typing-inspection==0.4.5 xgrammar==0.2.1)
# Kernels of mixtures of experts, of other attention and of other GPUs, a server in Rust, what others link against.
left_out=(vllm/vllm-rs vllm/third_party/deep_gemm vllm/third_party/fmha_sm100 vllm/_flashmla_C.abi3.so
    vllm/_flashmla_extension_C.abi3.so vllm/_qutlass_C.abi3.so vllm/_moe_C_stable_libtorch.abi3.so
    vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so xgrammar/lib)
slimmed=(vllm/_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so)
PIECE=48M # beside the project itself and its wheels, 64 MiB in all

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
scripts/collect_wheels.sh "$scratch/wheels" "$version" "${packages[@]}"
mkdir "$scratch/stage"
for wheel in "$scratch"/wheels/*.whl; do
    "$python" -m zipfile -e "$wheel" "$scratch/stage"
done
cd "$scratch/stage"
ls -d "${left_out[@]}" >/dev/null # a wheel that has other files than these were written for is not packed
rm -r "${left_out[@]}"
"$python" "$root/scripts/slim_cuda.py" "${slimmed[@]}"
strip --strip-debug xgrammar/*.so
mkdir -p "$folder"
rm -f "$folder"/piece.* "$folder/manifest"
# The same packages make the same bytes, so what is unpacked already stays as it is.
tar c --sort=name --mtime=@0 --owner=0 --group=0 . | xz -T0 -6 | split -b "$PIECE" - "$folder/piece."
(cd "$folder" && sha256sum piece.* >manifest && du -h --apparent-size piece.*)
