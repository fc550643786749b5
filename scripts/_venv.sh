# Sourced by the other scripts, after `set -euo pipefail`. Defines
#
#   use_venv SET    SET is base, commands (the extras of all commands), test or dev; each includes the previous one
#
# which leaves an up-to-date environment in .venv/ and sets `venv_python` to its interpreter, and
#
#   default_to_cpu    sets JAX_PLATFORMS=cpu on a machine without an accelerator, unless it is set
#
# .venv/.stamp records what is installed. It is removed before any change and written last, so an interrupted setup is
# detected and redone. It covers the requirements, the interpreter and the path of this checkout, because a copied
# environment still imports the old checkout.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
venv_python=$venv/bin/python

# Settings that would add other packages or change the install location. Index settings are kept.
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV __PYVENV_LAUNCHER__ \
  PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_NO_DEPS PIP_DRY_RUN PIP_PYTHON PIP_REQUIREMENT PIP_EDITABLE

_die() {
  echo "${0##*/}: error: $*" >&2
  exit 2
}

# Prints the interpreter of "$1" if it works, is 3.12 or newer and can create environments. It is run, because shims of
# pyenv exist for versions that are not selected.
_usable() {
  "$1" -I -c '
import sys
if sys.version_info < (3, 12):
    sys.exit(1)
import ensurepip, venv
print(sys.executable)
' 2>/dev/null </dev/null
}

_find_python() {
  local candidate
  for candidate in python3 python3.12 python3.13 python3.14 python3.15 python \
    "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.*/bin/python; do
    _usable "$candidate" && return
  done
  if command -v uv >/dev/null; then
    if candidate=$(uv python find --system '>=3.12' 2>/dev/null) && _usable "$candidate"; then return; fi
    echo "${0##*/}: no Python >= 3.12 found; letting uv install 3.12" >&2
    if uv python install 3.12 >&2 && candidate=$(uv python find --system 3.12) && _usable "$candidate"; then return; fi
  fi
  return 1
}

_level() {
  case $1 in base) echo 1 ;; commands) echo 2 ;; test) echo 3 ;; dev) echo 4 ;; *) echo 0 ;; esac
}

_extras() {
  case $1 in base) ;; commands) echo '[cli,engine,html]' ;; *) echo "[$1]" ;; esac
}

# Fails without a working interpreter in .venv.
_fingerprint() {
  (cd "$root" && "$venv_python" -I -c '
import configparser, hashlib, sys
assert sys.version_info >= (3, 12)
setup = configparser.RawConfigParser()
setup.read("setup.cfg")
text = [sys.version, sys.argv[1]]
text += [repr(setup.items(name)) for name in setup.sections() if name.startswith(("metadata", "options"))]
print(hashlib.sha256("\n".join(text).encode()).hexdigest())
' "$root" 2>/dev/null)
}

use_venv() {
  local want=$1 have_fingerprint='' have='' fingerprint='' python='' target
  if command -v flock >/dev/null; then
    exec 9<"$root/setup.cfg" # one setup at a time; closing the descriptor releases the lock
    flock 9
  fi
  if [ -f "$venv/.stamp" ]; then
    read -r have_fingerprint have <"$venv/.stamp" || true
    fingerprint=$(_fingerprint) || fingerprint=''
  fi
  if [ -z "$fingerprint" ] || [ "$fingerprint" != "$have_fingerprint" ] ||
    [ "$(_level "$have")" -lt "$(_level "$want")" ]; then
    if [ "$(_level "$have")" -gt "$(_level "$want")" ]; then want=$have; fi
    # If only packages are missing, add them; otherwise recreate the environment.
    if [ -z "$fingerprint" ] || [ "$fingerprint" != "$have_fingerprint" ]; then
      if [ -e "$venv" ] && [ ! -f "$venv/.made-by-scripts" ]; then
        _die "$venv exists and these scripts did not make it; move it away first"
      fi
      python=$(_find_python) || _die "no Python >= 3.12 with the venv module found; install one (Debian or Ubuntu:" \
        "apt install python3.12 python3.12-venv; pyenv: pyenv install 3.12; or install uv, which brings its own)"
      echo "${0##*/}: setting up $venv with $python (once; takes minutes)" >&2
      rm -rf "$venv"
      mkdir "$venv"
      touch "$venv/.made-by-scripts"
      "$python" -I -m venv "$venv"
      fingerprint=$(_fingerprint) || _die "the new environment in $venv does not run"
    else
      echo "${0##*/}: adding packages to $venv" >&2
    fi
    rm -f "$venv/.stamp"
    target=$root$(_extras "$want")
    COMPILE_TPU_OFFLOAD=0 \
      "$venv_python" -I -m pip --quiet --disable-pip-version-check install --editable "$target" 9>&- ||
      _die "pip could not install the packages (see above)"
    echo "$fingerprint $want" >"$venv/.stamp.new"
    mv "$venv/.stamp.new" "$venv/.stamp"
  fi
  exec 9<&-
}

# Without an accelerator jax searches for one, slowly and with warnings if libtpu is installed.
default_to_cpu() {
  local device
  if [ -n "${JAX_PLATFORMS:-}" ]; then return; fi
  for device in /dev/accel[0-9]* /dev/vfio/[0-9]* /dev/nvidia[0-9]* /dev/nvidiactl /dev/dxg /dev/kfd; do
    if [ -e "$device" ]; then return; fi
  done
  export JAX_PLATFORMS=cpu
}
