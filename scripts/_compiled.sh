# Sourced by scripts/test, after _venv.sh. Defines
#
#   make_compiled    copies this checkout to build/compiled/, with the modules that pip compiles for users in it (the
#                    first time, and after a change of the sources: minutes), and sets `compiled` to that folder
#   check_compiled PYTHON

# Ends the script unless the interpreter "$1" imports compiled modules; those of another Python it would ignore.
check_compiled() {
  "$1" -c 'from tpu_offload.native import is_compiled as is_it; raise SystemExit(not is_it())' ||
    _die "for $1 the modules in $compiled are not compiled"
}

make_compiled() {
  local stamp wheels
  compiled=$root/build/compiled
  mkdir -p "$compiled"
  stamp=$(cd "$root" && find setup.py setup.cfg pyproject.toml tpu_offload -type f ! -path '*/__pycache__/*' -print0 | sort -z |
    xargs -0 sha256sum | cat - <("$venv_python" -VV) | sha256sum)
  if [ "$(cat "$root/build/compiled.stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "${0##*/}: compiling into $compiled (2 to 10 minutes)" >&2
    rm -rf "$root/build/compiled.stamp" "${compiled:?}"/*.so "$compiled"/*.dist-info "$compiled/tpu_offload"
    wheels=$(mktemp -d)
    # Tests may be running: what they write is left out.
    tar cf - -C "$root" --exclude=__pycache__ tpu_offload tpu_offload_command.py setup.py setup.cfg pyproject.toml \
      README.md LICENSE | tar xf - -C "$wheels"
    COMPILE_TPU_OFFLOAD=1 "$venv_python" -I -m pip --quiet --disable-pip-version-check wheel --no-deps \
      --wheel-dir "$wheels/dist" "$wheels" || _die "the package could not be compiled (see above)"
    "$venv_python" -I -m zipfile -e "$wheels"/dist/*.whl "$compiled"
    rm -rf "$wheels"
    echo "$stamp" >"$root/build/compiled.stamp"
  fi
  # All but the package, which is compiled.
  rm -rf "${compiled:?}"/{benchmarks,deploy,docs,scripts,tests}
  (cd "$root" && tar cf - --exclude=__pycache__ .ci .github benchmarks deploy docs scripts tests ./*.md ./*.py ./*.cfg \
    ./*.toml LICENSE) | tar xf - -C "$compiled"
}
