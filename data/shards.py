"""The files that data/prepare.py writes: shards (llmc/data/dataloader.h), the tokenizer table
(llmc/data/tokenizer.h), and the state from which a broken run goes on. All have temporary names until all are complete.
"""

import contextlib
import glob
import json
import os
import re
import struct

from problems import BadInput, Interrupted

HEADER_BYTES = 1024
SHARD_U32, SHARD_MASKED, SHARD_U16 = (20240801, 7), (20240801, 9), (20240520, 1)  # magic, version
LARGEST_SHARD = (1 << 31) - 1  # versions 7 and 1 have a signed 32-bit count of tokens
TABLE_MAGIC, TABLE_VERSION = 20251121, 1


def token_kind(tokenizer):
    """The array type code of the ids: 16 bits if they suffice."""
    return "H" if tokenizer.vocabulary <= 1 << 16 and not tokenizer.masked else "I"


def sync(file):
    file.flush()
    os.fsync(file.fileno())


def write_safely(path, data):
    """A reader finds the old file or the new one, never a part."""
    with open(path + ".tmp", "wb") as f:
        f.write(data)
        sync(f)
    os.replace(path + ".tmp", path)


class Shards:
    """The shards of training or of validation: PREFIX.bin, and where one is full, PREFIX_000002.bin and so on."""

    def __init__(self, prefix, tokenizer, most, saved):
        self.prefix, self.kind, self.most, self.file = prefix, token_kind(tokenizer), most, None
        self.format = SHARD_MASKED if tokenizer.masked else SHARD_U16 if self.kind == "H" else SHARD_U32
        self.documents, self.counts = (saved["documents"], saved["counts"]) if saved else (0, [0])
        self.context = saved.get("context", 0) if saved else 0  # tokens that do not count in the loss

    def path(self, i):
        return self.prefix + (f"_{i + 1:06}.bin" if i else ".bin")

    def open_last(self, saved):
        """Opens the shard that is written: a new one, or that of a broken run as its state knows it."""
        path = self.path(len(self.counts) - 1) + ".tmp"
        self.file = open(path, "r+b" if saved else "wb")
        if not saved:
            self.file.write(bytes(HEADER_BYTES))
            return
        size = HEADER_BYTES + self.counts[-1] * struct.calcsize(self.kind)
        if os.path.getsize(path) < size:
            raise Interrupted(f"{path} is shorter than when the run broke off; remove it and the .state file")
        self.file.truncate(size)
        self.file.seek(size)

    def add(self, tokens):
        """Appends a document with its separator."""
        count = len(tokens)
        if count > self.most:
            words = f"document {self.documents + 1} of {self.prefix}*.bin has {count} tokens"
            raise BadInput(f"{words}, above --shard-tokens {self.most}")
        if self.counts[-1] + count > self.most:
            self.close()
            self.counts.append(0)
            self.open_last(saved=False)
        self.file.write(tokens)
        self.counts[-1] += count
        self.documents += 1
        if self.format == SHARD_MASKED:
            self.context += tokens.tobytes()[3::4].count(0x80)  # the byte of the mark; ids stay below it

    def close(self):
        self.file.seek(0)
        self.file.write(struct.pack("<iii", *self.format, self.counts[-1]))
        sync(self.file)
        self.file.close()

    def progress(self):
        """Returns what the state keeps, once the tokens are on the disk."""
        if not self.file.closed:
            sync(self.file)
        return {"documents": self.documents, "counts": self.counts, "context": self.context}

    def discard(self):
        if self.file:
            with contextlib.suppress(OSError):  # a full disk, reported already
                self.file.close()
        for i in range(len(self.counts)):
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path(i) + ".tmp")

    def paths(self):
        return [self.path(i) for i in range(len(self.counts))]

    def print_counts(self):
        many = len(self.counts) > 1
        for path, count in zip(self.paths(), self.counts) if many else []:
            print(f"{path}: {count} tokens")
        name = f"'{self.prefix}*.bin'" if many else self.path(0)
        tokens = sum(self.counts)
        counted = f", {tokens - self.context} count in the loss" if self.format == SHARD_MASKED else ""
        print(f"{name}: {self.documents} documents, {tokens} tokens, {self.documents} of them separators{counted}")


def write_table(path, tokenizer):
    table = tokenizer.table()
    parts = [struct.pack("<IIII", TABLE_MAGIC, TABLE_VERSION, len(table), tokenizer.separator)]
    for token in table:
        parts.append(struct.pack("<I", len(token)) + token)
    with open(path, "wb") as f:
        f.write(b"".join(parts))
        sync(f)


def refuse_old_shards(prefix):
    """Ends the program if a pattern of the new shards would also match others."""
    for split in ("_train", "_val"):
        for name in sorted(glob.glob(glob.escape(prefix + split) + "_*.bin")):
            if re.search(r"_\d{6}\.bin$", name):
                raise BadInput(
                    f"{name} exists, and would be read with the new shards; move it away or give another --name"
                )


def publish(paths):
    """Gives complete files their names. A run that broke off here has done so with some of them."""
    for path in paths:
        if os.path.exists(path + ".tmp"):
            os.replace(path + ".tmp", path)


class State:
    """PREFIX.state, a JSON file beside the shards: how far a run was when it last saved."""

    def __init__(self, prefix, settings, sources):
        self.path, self.settings, self.sources = prefix + ".state", settings, sources

    def load(self):
        """Returns what was saved, or None. Ends the program if it is of other settings or sources."""
        if not os.path.exists(self.path):
            return None
        remedy = f"correct that, or remove {self.path} to begin anew"
        try:
            with open(self.path, encoding="utf-8") as f:
                saved = json.load(f)
            settings, sources = saved["settings"], saved["sources"]
        except (ValueError, KeyError, TypeError):
            raise BadInput(f"{self.path}: is no state of a broken run; {remedy}") from None
        for name, now in self.settings.items():
            if settings.get(name) != now:
                raise BadInput(
                    f"{self.path}: a broken run had {name} {settings.get(name)}, this one has {now}; {remedy}"
                )
        if sources != self.sources:
            then, now = ("; ".join(f"{name}: {files} files, {size} bytes" for name, files, size, _ in rows)
                         for rows in (sources, self.sources))
            raise BadInput(f"{self.path}: the sources changed since the run broke off: {then}. Now: {now}. So {remedy}")
        return saved

    def save(self, **progress):
        saved = {"settings": self.settings, "sources": self.sources, **progress}
        write_safely(self.path, json.dumps(saved).encode())

    def remove(self):
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.path)
