# Shared by tools/test, tools/demo and tools/build-wheel: a Python, a compiler, a virtual environment.
# To be sourced by bash with `set -euo pipefail`.

export PIP_DISABLE_PIP_VERSION_CHECK=1
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '%s\n' "$*" >&2; }

die() { say "$*"; exit 1; }

apt_updated=
apt_install() {
    command -v apt-get >/dev/null || die "missing: $*. Install what provides it and run this again."
    [ "$(id -u)" = 0 ] || die "missing: $*. Run as root, or: sudo apt-get install $*"
    if [ -z "$apt_updated" ]; then
        say "apt-get update"
        apt-get -qq update >/dev/null 2>&1 || say "apt-get update failed; going on with the lists that are here"
        apt_updated=yes
    fi
    say "apt-get install $*"
    local output
    output="$(DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$@" 2>&1)" ||
        die "$output" "apt-get could not install $*"
}

fit() { "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

# Sets $python to an interpreter of a version that the package serves.
find_python() {
    local name
    for name in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null && fit "$name"; then python="$name"; return; fi
    done
    apt_install python3 python3-venv
    if fit python3; then python=python3; return; fi
    for name in python3.13 python3.12 python3.11; do
        if apt-cache show "$name-venv" >/dev/null 2>&1; then
            apt_install "$name" "$name-venv"
            python="$name"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 here, and the distribution has none"
}

# make_venv FOLDER: makes it unless it is there and works.
make_venv() {
    if [ -x "$1/bin/python" ] && fit "$1/bin/python" && "$1/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
    find_python
    say "making $1 with $("$python" --version)"
    rm -rf "$1"
    if ! "$python" -m venv "$1" >/dev/null 2>&1; then
        # Debian and Ubuntu keep ensurepip in a package of its own.
        rm -rf "$1"
        apt_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
        "$python" -m venv "$1"
    fi
}

need_compiler() {
    if ! command -v "${CXX:-c++}" >/dev/null; then apt_install g++; fi
}
