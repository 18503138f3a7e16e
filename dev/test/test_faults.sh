#!/usr/bin/env bash
# The fault campaign in its short form: a few points of every kind of fault, and each fuzz target on some thousand inputs. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
exec python3 dev/fault/campaign.py --quick
