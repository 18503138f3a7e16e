#!/bin/sh
# Installs the packages of data/requirements.txt in a virtual environment: data/.venv, or the folder given as the first
# argument. Does nothing if it has installed the same list there before. Afterwards:
# data/.venv/bin/python data/prepare.py tinystories --tokenizer llama3
set -eu
case ${1:-} in -*)
    echo "usage: data/setup_venv.sh [FOLDER]
Installs the packages of data/requirements.txt in a virtual environment (data/.venv)."
    [ "$1" = --help ] && exit 0 || exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-$here/.venv}
python=${PYTHON:-python3}

if cmp -s "$here/requirements.txt" "$venv/installed.txt"; then
    echo "$venv: up to date"
    exit 0
fi
fail() { echo "error: $1" >&2; exit 1; }
command -v "$python" >/dev/null || fail "$python is not installed (Debian: apt install python3 python3-venv)"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments (Debian: apt install python3-venv)"
echo "installing $(grep -c == "$here/requirements.txt") packages in $venv; this takes half a minute"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.txt"
"$venv/bin/python" -c 'import jinja2, pyarrow.parquet, tiktoken, tokenizers'
cp "$here/requirements.txt" "$venv/installed.txt"  # last, so that an incomplete environment is made again
echo "$venv: ready"
