#!/usr/bin/env bash
# Formats all C and CUDA code with clang-format and the rules of .clang-format. --check changes nothing: it prints what
# is not formatted and ends with status 1. Versions of clang-format differ in their output, so one is pinned: it is
# taken from PATH, or installed with pip in build/clang-format. With --no-install nothing is installed: if this version
# is in neither place, the status is 3.
set -u
cd "$(dirname "$0")/.."
version=20.1.8
check=() install=1
for argument in "$@"; do
    case $argument in
        --check) check=(--dry-run --Werror) ;;
        --no-install) install= ;;
        *) echo "usage: dev/format.sh [--check] [--no-install]" >&2; exit 2 ;;
    esac
done

is_pinned() { [ -n "$(command -v "$1")" ] && "$1" --version | grep -q "version $version"; }

program=clang-format
is_pinned "$program" || program=build/clang-format/bin/clang-format
if ! is_pinned "$program"; then
    [ -n "$install" ] || { echo "clang-format $version is not installed; make format installs it" >&2; exit 3; }
    python3 -m venv build/clang-format && build/clang-format/bin/pip install -q "clang-format==$version" || {
        rm -rf build/clang-format
        echo "error: cannot install clang-format $version in build/clang-format, which needs python3-venv (Debian," \
            "Ubuntu: apt install python3-venv) and network; or put clang-format $version on PATH. Without it the code" \
            "stays as it is; CI checks its format" >&2
        exit 1
    }
fi
find train_fp8.c train_fp8.cu gradient_bias.c gradient_bias.cu llmc data dev -name .venv -prune -o \
    \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
    xargs -0 "$program" -i "${check[@]}"
