#!/usr/bin/env bash
# Tests that scripts do not rely on the words of the trainer's messages. Builds a CPU trainer whose messages have
# reversed words (reword.py). With this trainer, runs test_run_recipes.sh and test_sweep.sh, which scripts/test.sh does
# not run again with train_fp8, and checks the estimates of a run script. Needs mpirun and python3. Ends with "N passed,
# N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
. dev/test/lib/cpu_trainer.sh
reword="python3 dev/test/reword.py"
other=$tmp/train_fp8

cp -r Makefile train_fp8.c train_fp8.cu llmc "$tmp"
changed=$($reword "$tmp/train_fp8.c" "$tmp"/llmc/*/*.h)
check "at least 400 string literals have other words ($changed)" [ "${changed:-0}" -ge 400 ]
flags='-std=gnu11 -O1 -ftree-vectorize -march=native -fopenmp -ffp-contract=off -Wall -Wextra -Werror $(MPI_CFLAGS)'
check "a trainer with other words compiles" make -s -C "$tmp" train_fp8 CFLAGS="$flags"

# These words are in the trainer's help and not in the other trainer's. A script that searches for them fails with the
# other trainer, so the tests below find such a script.
for words in '^MODEL: ' '^  --precision .*dtype of GEMMs' '^exit status'; do
    check "the trainer's help has \"$words\"" grep -q -- "$words" <(./train_fp8 --help all)
    check "the other trainer's help lacks \"$words\"" eval '! grep -q -- "$words" <("$other" --help all)'
done
message="unknown option --bogus (--help all lists all)"
check "the trainer prints an error in its own words" equal "$(./train_fp8 --bogus 2>&1)" "error: $message"
check "the other trainer prints the error in other words" \
    equal "$("$other" --bogus 2>&1)" "error: $($reword <<<"$message")"
check "words that are reversed twice are unchanged" equal "$($reword <<<"$message" | $reword)" "$message"

# Output for programs is equal, but for the names of memory groups and of the sources in --dry-run --json.
for list in models recipes options; do
    check "--list $list is equal in both trainers" equal "$("$other" --list $list)" "$(./train_fp8 --list $list)"
done
plan() { "$1" llama3.1-8b --precision fp8 --dry-run --json | sed 's/"\(name\|build\)": "[^"]*"/"\1": ""/g'; }
check "--dry-run --json is equal in both trainers, but for names" equal "$(plan "$other")" "$(plan ./train_fp8)"

# The scripts work with the other trainer.
cost() {
    TRAINER=$1 OUT=$tmp/out GPUS=2 scripts/run_llama3.2-1b.sh --dry-run 2>&1 | grep -E '^(cost|disk): ' |
        sed 's/, [^,]* are free$//' # other programs change the free space
}
cost ./train_fp8 >"$tmp/cost"
check "a run script prints two lines of estimates" equal "$(grep -c . "$tmp/cost")" 2
check "a run script's estimates are equal with both trainers" equal "$(cost "$other")" "$(cat "$tmp/cost")"
export TRAINER=$other REWORD=$reword
QUIET=1
tally test_run_recipes.sh bash dev/test/test_run_recipes.sh
tally test_sweep.sh bash dev/test/test_sweep.sh
finish
