#!/usr/bin/env bash
# Tests the order of files in llmc/. llmc/README.md lists every file with its first line, a file includes only files
# that are listed before it, and no .h includes a .cuh. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. scripts/tally.sh

# Prints the files that $1/README.md lists, in its order, as folder/file. With $2 = lines, also prints their
# descriptions.
listed() { awk -v lines="${2:-}" -F'`' '/^## / { folder = $0; sub(/^## /, "", folder); sub(/:.*/, "", folder) }
    /^- `/ { print folder $2 (lines ? substr($3, 2) : "") }' "$1/README.md"; }

# Prints every include in tree $1 of a file that is not listed before, or of a .cuh in a .h, as "FILE includes OTHER".
climbs() {
    (cd "$1" && for file in */*.h */*.cuh; do
        sed -n 's/^ *# *include "\(.*\)"/\1/p' "$file" | while read -r other; do
            echo "$file $(realpath -m --relative-to=. "$(dirname "$file")/$other")"
        done
    done) | awk 'NR == FNR { floor[$1] = NR; next }
        !($2 in floor) || floor[$2] >= floor[$1] || ($1 ~ /\.h$/ && $2 ~ /\.cuh$/) { print $1, "includes", $2 }' \
        <(listed "$1") -
}

check "llmc/README.md lists every file once" equal "$(listed llmc | sort)" "$(cd llmc && ls */*.h */*.cuh | sort)"
while read -r line; do
    file=${line%%[ ]*}
    check "README.md repeats the first line of $file" equal "$line" "$file $(sed -n '1s#^// ##p' "llmc/$file")"
done < <(listed llmc lines)
check "files of llmc/ include only files that are listed before them, and no .h includes a .cuh" \
    equal "$(climbs llmc)" ""
check "every #include \"...\" of the trainers has the form \"llmc/FOLDER/FILE\"" \
    equal "$(grep -h '^#include "' train_fp8.c train_fp8.cu |
        grep -vE '"llmc/[a-z0-9]+/[a-z0-9_]+\.(cuh|h)"')" ""

# The test finds an include of a file that is listed later, within a folder and between folders, and C that includes
# CUDA.
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cp -r llmc "$tmp/"
sed -i '1a #include "../run/run.h"' "$tmp/llmc/base/utils.h"
sed -i '1a #include "precision.h"' "$tmp/llmc/config/recipes.h"
sed -i '1a #include "../fp8/amax.cuh"' "$tmp/llmc/run/stop.h"
check "the test finds includes of files that are listed later, and of a .cuh in a .h" \
    equal "$(climbs "$tmp/llmc" | sort)" "base/utils.h includes run/run.h
config/recipes.h includes config/precision.h
run/stop.h includes fp8/amax.cuh"
finish
