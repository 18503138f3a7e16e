#!/usr/bin/env bash
# Runs the short fault campaign: a few points of every kind of fault, and 3,000 inputs or more for each fuzz target.
# Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
exec python3 dev/fault/campaign.py --quick
