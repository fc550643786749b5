# Sourced by scripts/test, after _venv.sh and `use_venv`. Defines
#
#   fetch_prometheus    unpacks Debian's (or Ubuntu's) package `prometheus` into .venv/prometheus/, unless it is there or
#                       prometheus and promtool are installed
#
# It needs apt, but no root: the package is not installed, and apt's lists and cache are in a temporary folder, because
# those of a container are often empty. Without apt or network it says so and goes on; the tests that need Prometheus are
# skipped then, and fail in CI (CI=true). A release from another place would need a checksum to be trusted; apt verifies
# its packages itself.

_fetch_prometheus() {
  local folder=$1 debs lists
  lists=$folder/lists debs=$folder/debs
  mkdir -p "$lists/partial" "$debs/partial"
  local options=(-qq -o "Dir::State::lists=$lists" -o "Dir::Cache=$debs" -o APT::Sandbox::User=root -o Acquire::Retries=3
    -o Acquire::Languages=none)
  apt-get "${options[@]}" update
  (cd "$debs" && apt-get "${options[@]}" download prometheus)
  dpkg-deb -x "$debs"/prometheus_*.deb "$folder/unpacked"
  "$folder/unpacked/usr/bin/promtool" --version >/dev/null
}

fetch_prometheus() {
  local target=$venv/prometheus folder
  if command -v prometheus >/dev/null && command -v promtool >/dev/null; then return; fi
  if [ -x "$target/usr/bin/promtool" ]; then return; fi
  if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "${0##*/}: no Prometheus: install it, or run this on Debian or Ubuntu, to test the dashboard and the alerts" >&2
    return
  fi
  echo "${0##*/}: fetching the package prometheus into $target (once)" >&2
  folder=$(mktemp -d "$venv/prometheus.XXXXXX")
  # In a process of its own, so that a failure of any command in it ends it.
  if bash -euo pipefail -c "$(declare -f _fetch_prometheus); _fetch_prometheus \"\$1\"" _ "$folder" >&2; then
    rm -rf "$target"
    mv "$folder/unpacked" "$target"
  else
    echo "${0##*/}: the package prometheus could not be fetched; the tests that need it are skipped" >&2
  fi
  rm -rf "$folder"
}
