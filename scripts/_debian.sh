# Sourced by scripts/test, after _venv.sh and `use_venv`. Defines
#
#   fetch_debian COMMAND FOLDER PACKAGE...    unpacks Debian's packages, and what they need and this machine lacks, into
#                                             .venv/FOLDER/, unless COMMAND is installed or there
#
# On Ubuntu `chromium` is a stub for a snap: install a browser and its driver there.
#
# It needs apt, but no root: nothing is installed, and apt's lists and cache are in a temporary folder, because those of a
# container are often empty. Without apt or network it says so and goes on; the tests that need the packages are skipped
# then, and fail in CI (CI=true). A release from another place would need a checksum to be trusted; apt verifies its
# packages itself.

_fetch_debian() {
  local folder=$1 command=$2 deb options
  shift 2
  mkdir -p "$folder/lists/partial" "$folder/debs/archives/partial" "$folder/unpacked"
  options=(-qq -o "Dir::State::lists=$folder/lists" -o "Dir::Cache=$folder/debs" -o APT::Sandbox::User=root
    -o Acquire::Retries=3 -o Acquire::Languages=none -o Debug::NoLocking=1)
  apt-get "${options[@]}" update
  apt-get "${options[@]}" install --yes --download-only --no-install-recommends "$@"
  for deb in "$folder"/debs/archives/*.deb; do dpkg-deb -x "$deb" "$folder/unpacked"; done
  [ -x "$folder/unpacked/usr/bin/$command" ]
}

fetch_debian() {
  local command=$1 target=$venv/$2 folder
  if command -v "$command" >/dev/null || [ -x "$target/usr/bin/$command" ]; then return; fi
  shift 2
  if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "${0##*/}: no $command: install it, or run this on Debian or Ubuntu; the tests that need it are skipped" >&2
    return
  fi
  echo "${0##*/}: fetching $1 into $target (once)" >&2
  folder=$(mktemp -d "$target.XXXXXX")
  # In a process of its own, so that a failure of any command in it ends it.
  if bash -euo pipefail -c "$(declare -f _fetch_debian); _fetch_debian \"\$@\"" _ "$folder" "$command" "$@" >&2; then
    rm -rf "$target"
    mv "$folder/unpacked" "$target"
  else
    echo "${0##*/}: the package $1 could not be fetched; the tests that need it are skipped" >&2
  fi
  rm -rf "$folder"
}
