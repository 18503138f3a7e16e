#!/usr/bin/env python3
"""usage: data/export_tokenizer.py FOLDER

Makes tokenizer.json and tokenizer_config.json, with which transformers loads the tokenizer of an export or checkpoint
that was trained on shards of --tokenizer bytes, llama3 or qwen, from the tokens.tokenizer in FOLDER. Models that were
loaded with a tokenizer of their own have it already.
"""

import json
import os
import struct
import sys

from problems import BadInput
from shards import TABLE_MAGIC
from vocabulary import BYTE_LEVEL, SPLIT_PATTERN

# by the number of ids and the separator: the tokenizer, and how its pattern groups digits
KINDS = {(257, 256): ("bytes", None), (128256, 128000): ("llama3", r"\p{N}{1,3}"), (151646, 151643): ("qwen", r"\p{N}")}


def read_table(path):
    """Returns the tokens and the separator's id (llmc/data/tokenizer.h)."""
    try:
        with open(path, "rb") as f:
            data = f.read(64 << 20)
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror}; FOLDER is an export, or a checkpoint's step folder") from None
    if len(data) < 16 or struct.unpack_from("<I", data)[0] != TABLE_MAGIC:
        raise BadInput(f"{path}: not a tokenizer table")
    _, _, count, separator = struct.unpack_from("<IIII", data)
    tokens, at = [], 16
    while len(tokens) < count and at + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, at)
        tokens.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if len(tokens) < count or at != len(data):
        raise BadInput(f"{path}: the table is damaged: {len(data)} bytes do not hold its {count} tokens")
    return tokens, separator


def halves(token, ranks):
    """Returns the two tokens that byte pair encoding joins to this one, or None if it never does."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, ranks[token]) for a, b in zip(parts, parts[1:])]
        i = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[i] >= ranks[token]:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def tokenizer_json(tokens, separator, digits):
    letters = {byte: letter for letter, byte in BYTE_LEVEL.items()}

    def text(token):
        return "".join(letters[byte] for byte in token)

    ranks = {token: i for i, token in enumerate(tokens[:separator])}
    merges = [halves(token, ranks) for token in ranks if len(token) > 1]
    special = [token.decode() for token in tokens[separator:]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN % digits}, "behavior": "Isolated", "invert": False}
    first = special[0]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    pieces = [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "version": "1.0",
        "added_tokens": [{"id": separator + i, "content": name, **flags} for i, name in enumerate(special)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]} if digits else byte_level,
        # training puts the separator before each document
        "post_processor": {
            "type": "TemplateProcessing",
            "single": pieces,
            "pair": pieces + [{"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {first: {"id": first, "ids": [separator], "tokens": [first]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {text(token): i for token, i in ranks.items()},
            "merges": [[text(part) for part in pair] for pair in merges if pair],
        },
    }


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__.strip())
        return 0 if "--help" in sys.argv[1:] else 2
    path = os.path.join(sys.argv[1], "tokens.tokenizer")
    made = {name: os.path.join(sys.argv[1], name) for name in ("tokenizer.json", "tokenizer_config.json")}
    if os.path.exists(made["tokenizer.json"]):
        raise BadInput(f"{made['tokenizer.json']} is there already")
    tokens, separator = read_table(path)
    if (len(tokens), separator) not in KINDS:
        raise BadInput(f"{path}: not a table of bytes, llama3 or qwen; copy the tokenizer.json that made the shards")
    kind, digits = KINDS[len(tokens), separator]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokens[separator].decode(),
              "clean_up_tokenization_spaces": False}
    files = {"tokenizer_config.json": config, "tokenizer.json": tokenizer_json(tokens, separator, digits)}
    for name, value in files.items():
        with open(made[name] + ".tmp", "w", encoding="utf-8") as f:
            json.dump(value, f, ensure_ascii=False)
        os.replace(made[name] + ".tmp", made[name])
    print(f"{sys.argv[1]}: the tokenizer of {kind}, {len(tokens)} tokens")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BadInput as e:
        sys.exit(f"error: {e}")
