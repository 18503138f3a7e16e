#!/usr/bin/env bash
# Installs the libraries of the reports, pinned in scripts/report_requirements.txt, in a virtual environment:
# build/report-venv, or the folder given as the first argument. Does nothing if it has installed the same list there
# before. PYTHON names another Python than python3. Training needs none of the libraries.
set -eu
case ${1:-} in -*)
    echo "usage: scripts/setup_report.sh [FOLDER]: installs the libraries of the reports in FOLDER (build/report-venv)"
    [ "$1" = --help ] && exit 0 || exit 2 ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
requirements=$root/scripts/report_requirements.txt
venv=${1:-$root/build/report-venv}
python=${PYTHON:-python3}

fail() { echo "error: $*" >&2; exit 1; }

if cmp -s "$requirements" "$venv/installed.txt"; then
    echo "$venv: up to date"
    exit 0
fi
command -v "$python" >/dev/null || fail "$python is not installed (Debian: apt install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old for the libraries of the reports; set PYTHON to Python 3.11 or newer"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments (Debian: apt install python3-venv)"
echo "installing $(grep -c == "$requirements") libraries of the reports in $venv; this takes a minute"
mkdir -p "$(dirname "$venv")"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    -r "$requirements" ||
    fail "the libraries of the reports could not be installed in $venv"
"$venv/bin/python" -c 'import matplotlib, jinja2, numpy, scipy, tensorboardX'
cp "$requirements" "$venv/installed.txt"  # last, so that an unfinished environment is made again
echo "$venv: ready"
