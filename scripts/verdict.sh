#!/usr/bin/env bash
# Measures what FP8 costs in loss and gives in speed and energy: pairs of BF16 and FP8 runs, and a report. See --help.
cd "$(dirname "$0")/.." && exec python3 scripts/verdict.py "$@"
