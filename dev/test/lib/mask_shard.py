"""Copies a shard of 16-bit tokens as one with a loss mask, in which runs of 9 tokens are context or count.

usage: mask_shard.py FROM TO
"""
import array
import sys

with open(sys.argv[1], "rb") as f:
    tokens = array.array("H", f.read()[1024:])
words = array.array("I", [20240801, 9, len(tokens)] + [0] * 253)
words.extend(token | (i // 9 % 7 > 2) << 31 for i, token in enumerate(tokens))
with open(sys.argv[2], "wb") as f:
    f.write(words.tobytes())
