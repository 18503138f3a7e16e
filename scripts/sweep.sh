#!/usr/bin/env bash
# Trains every combination of model, sequence length, number of GPUs and precision for some steps. Each run has its own
# log folder. Ends with a table; see --help.
cd "$(dirname "$0")/.." && exec python3 scripts/sweep.py "$@"
