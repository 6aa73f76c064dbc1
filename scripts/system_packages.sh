#!/usr/bin/env bash
# Installs the few Debian packages that building needs, with "tests" also those of the C++ tests, where they are
# missing and this user may.
set -euo pipefail

missing=()
command -v g++ >/dev/null || missing+=(g++)
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
[ "${1:-}" != tests ] || [ -d /usr/src/googletest ] || [ -n "${GTEST_ROOT:-}" ] || missing+=(libgtest-dev)
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing Debian packages: ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  # GoogleTest alone is no reason to stop: CMake fetches it where the network allows, and only tests need it.
  echo "please install: ${missing[*]} (for example: sudo apt-get install ${missing[*]})" >&2
  command -v g++ >/dev/null || exit 1
fi
