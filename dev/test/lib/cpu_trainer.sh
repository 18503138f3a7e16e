# Sourced by tests of the CPU trainer, in the root of the tree. Builds it and build/synth_stories, and makes the folder
# $tmp, which ends with the test; $out is a name in it for the output of a run.
. scripts/tally.sh
make -s train_fp8 build/synth_stories || exit 1
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
out=$tmp/out
