#!/usr/bin/env bash
# Runs the short fault campaign: a few points of every kind of fault, and 3,000 inputs or more for each fuzz target.
# Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
# The short campaign prints commands that repeat its points in the long one, so both must number them equally.
PYTHONPATH=dev/fault python3 -B -c '
import campaign
points = list(campaign.resume_configurations(False))
assert [point[0] for point in points] == list(range(1, len(points) + 1)), "the numbers do not count from 1"
assert all(point in points for point in campaign.resume_configurations(True)), "short and long campaign differ"
' || { echo "FAILED: section resume numbers its points wrongly"; echo "0 passed, 1 failed"; exit 1; }
exec python3 dev/fault/campaign.py --quick
