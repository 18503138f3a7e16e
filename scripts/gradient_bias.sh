#!/usr/bin/env bash
# Measures what FP8 does to gradients: its bias against BF16 on the same data, by layer and linear layer. See --help.
cd "$(dirname "$0")/.." && exec python3 scripts/gradient_bias.py "$@"
