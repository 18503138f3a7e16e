#!/usr/bin/env bash
# Trains one model in BF16 and in FP8 recipes (all, or those of --recipes), with FP8 audits. Ends with a table of losses
# and speeds. See --help.
cd "$(dirname "$0")/.." && exec python3 scripts/run_recipes.py "$@"
