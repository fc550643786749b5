# Sourced by scripts/test, after _venv.sh and `use_venv`. Defines
#
#   fetch_browser    unpacks Debian's (or Ubuntu's) packages `chromium` and `chromium-driver`, and what they need and this
#                    machine lacks, into .venv/chromium/, unless they are there or installed
#
# For the tests of the HTML reports. Like `fetch_prometheus` it needs apt, but no root, and installs nothing.

_fetch_browser() {
  local folder=$1 deb options
  mkdir -p "$folder/lists/partial" "$folder/debs/archives/partial" "$folder/unpacked"
  options=(-qq -o "Dir::State::lists=$folder/lists" -o "Dir::Cache=$folder/debs" -o APT::Sandbox::User=root
    -o Acquire::Retries=3 -o Acquire::Languages=none -o Debug::NoLocking=1)
  apt-get "${options[@]}" update
  apt-get "${options[@]}" install --yes --download-only --no-install-recommends \
    chromium chromium-driver fonts-dejavu-core fontconfig-config
  for deb in "$folder"/debs/archives/*.deb; do dpkg-deb -x "$deb" "$folder/unpacked"; done
  [ -x "$folder/unpacked/usr/bin/chromedriver" ]
}

fetch_browser() {
  local target=$venv/chromium folder
  if command -v chromedriver >/dev/null && command -v chromium >/dev/null; then return; fi
  if [ -x "$target/usr/bin/chromedriver" ]; then return; fi
  if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "${0##*/}: no Chromium: install it, or run this on Debian or Ubuntu, to test the HTML reports" >&2
    return
  fi
  echo "${0##*/}: fetching the package chromium into $target (once)" >&2
  folder=$(mktemp -d "$venv/chromium.XXXXXX")
  if bash -euo pipefail -c "$(declare -f _fetch_browser); _fetch_browser \"\$1\"" _ "$folder" >&2; then
    rm -rf "$target"
    mv "$folder/unpacked" "$target"
  else
    echo "${0##*/}: the package chromium could not be fetched; the tests that need it are skipped" >&2
  fi
  rm -rf "$folder"
}
