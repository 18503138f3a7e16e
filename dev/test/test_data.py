#!/usr/bin/env python3
"""Tests data/tinystories.py and data/synth_stories.c.

It tests shards, tables, download and wrong input of tinystories.py, compares its tokens with those of ../shared/data,
if that is there, and tests shards, stories and wrong options of synth_stories.

Needs only the standard library. Tests that need the packages of data/requirements.txt use data/.venv/bin/python, or are
skipped with a reason. Ends with "N passed, N failed".
"""
import array
import bz2
import functools
import gzip
import http.server
import os
import re
import struct
import subprocess
import sys
import tempfile
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "dev", "test", "lib"))
from counted import check, finish  # noqa: E402

SCRIPT = os.path.join(ROOT, "data", "tinystories.py")
VENV_PYTHON = os.path.join(ROOT, "data", ".venv", "bin", "python")
SHARED = os.path.join(ROOT, "..", "shared", "data")
STORIES = ["Once upon a time.\n\nThe end.", "Zwei Bären spielten.", "A \"cat\" sat.\nIt was 1234 o'clock \u2603!"]



def run(*arguments, python=sys.executable, **environment):
    result = subprocess.run([python, SCRIPT, *arguments], capture_output=True, text=True, timeout=300,
                            env={**os.environ, "no_proxy": "127.0.0.1", **environment})
    return result.returncode, result.stdout + result.stderr


def read_shard(path):
    """Returns (magic, version, tokens). Checks the count of the header."""
    with open(path, "rb") as f:
        magic, version, count = struct.unpack("<iii", f.read(12))
        f.seek(1024)
        tokens = array.array("I" if magic == 20240801 else "H", f.read())
    check(count == len(tokens), f"{path}: {count} tokens in the header, {len(tokens)} in the file")
    return magic, version, list(tokens)


def read_table(path):
    with open(path, "rb") as f:
        data = f.read()
    magic, version, count, separator = struct.unpack_from("<IIII", data)
    at, tokens = 16, []
    for _ in range(count):
        length, = struct.unpack_from("<I", data, at)
        tokens.append(data[at + 4:at + 4 + length])
        at += 4 + length
    check((magic, version, at) == (20251121, 1, len(data)),
          f"{path}: magic number, version and size are right: {magic}, {version}, {at} of {len(data)} bytes read")
    return separator, tokens


def write_text(path, stories):
    with open(path, "w", encoding="utf-8") as f:
        f.write("".join(f"{s}\n<|endoftext|>\n" for s in stories))
    return path


def decode(tokens, separator, table):
    """Returns the stories of a shard as strings. A separator comes before each story."""
    stories = []
    for token in tokens:
        if token == separator:
            stories.append(b"")
        else:
            stories[-1] += table[token]
    return [s.decode() for s in stories]


def test_bytes(folder):
    text, val = write_text(f"{folder}/a.txt", STORIES), write_text(f"{folder}/v.txt", STORIES[:1])
    status, output = run("--tokenizer", "bytes", "--text", text, "--val-text", val, "--out", f"{folder}/out")
    check(status == 0, output)
    separator, table = read_table(f"{folder}/out/tinystories_bytes.tokenizer")
    check(separator == 256 and table == [bytes([i]) for i in range(256)] + [b"<|endoftext|>"],
          "the byte tokenizer's table has 256 bytes and the separator")
    magic, version, tokens = read_shard(f"{folder}/out/tinystories_bytes_train.bin")
    expected = [t for s in STORIES for t in [256, *s.encode()]]
    check((magic, version) == (20240520, 1) and tokens == expected, "the training shard has the bytes of the text")
    check(read_shard(f"{folder}/out/tinystories_bytes_val.bin")[2] == [256, *STORIES[0].encode()],
          "the validation shard has the bytes of the text")
    check(sorted(os.listdir(f"{folder}/out")) == ["tinystories_bytes.tokenizer", "tinystories_bytes_train.bin",
                                                  "tinystories_bytes_val.bin"],
          "--out has the table and the two shards, and no other file")


def test_layouts(folder):
    """Texts without a final marker, with Windows line ends, markers within a line, empty stories, a marker on the
    border of two reads, or bytes that are not UTF-8.
    """
    def tokens_of(data):
        with open(f"{folder}/l.txt", "wb") as f:
            f.write(data)
        status, output = run("--tokenizer", "bytes", "--text", f"{folder}/l.txt", "--val-text", f"{folder}/v.txt",
                             "--out", folder, "--name", "l")
        check(status == 0, output)
        return bytes(t if t < 256 else 0 for t in read_shard(f"{folder}/l_train.bin")[2])

    write_text(f"{folder}/v.txt", ["v"])
    check(tokens_of(b"one\n<|endoftext|>\ntwo\n") == b"\0one\0two", "a text without a final marker gives its stories")
    check(tokens_of(b"one\r\n<|endoftext|>\r\ntwo\r\n<|endoftext|>\r\n") == b"\0one\0two",
          "a text with Windows line ends gives its stories")
    check(tokens_of(b"one<|endoftext|>two<|endoftext|>") == b"\0one\0two",
          "a text with markers within a line gives its stories")
    check(tokens_of(b"<|endoftext|>\n \n<|endoftext|>\none\n<|endoftext|>") == b"\0one", "empty stories are left out")
    for back in range(1, 14):
        long = b"x" * ((1 << 20) - back)
        check(tokens_of(long + b"<|endoftext|>two") == b"\0" + long + b"\0two",
              f"a marker {back} bytes before the end of a read separates stories")
    check(tokens_of(b"caf\xe9<|endoftext|>two") == "\0caf\ufffd\0two".encode(),
          "bytes that are not UTF-8 become U+FFFD")


def test_split_and_fraction(folder):
    stories = [f"Story {i}." + "x" * (i % 7) for i in range(1000)]
    one, two = write_text(f"{folder}/1.txt", stories[:600]), write_text(f"{folder}/2.txt", stories[600:])
    size = os.path.getsize(one) + os.path.getsize(two)
    status, output = run("--tokenizer", "bytes", "--text", one, two, "--out", folder, "--name", "all")
    check(status == 0, output)
    table = read_table(f"{folder}/all.tokenizer")[1]
    read = lambda name: decode(read_shard(f"{folder}/{name}")[2], 256, table)
    check(read("all_train.bin") == [s for i, s in enumerate(stories) if i % 50 != 49],
          "without --val-text, the training shard lacks each 50th story and has all others")
    check(read("all_val.bin") == stories[49::50], "without --val-text, the validation shard has each 50th story")
    for fraction in (0.1, 0.613, 0.95):
        status, output = run("--tokenizer", "bytes", "--text", one, two, "--val-text", one, "--out", folder, "--name",
                             "part", "--fraction", str(fraction))
        got = read("part_train.bin")
        # The limit may lie within a story or in the separator after it. Then that story is left out. All stories before
        # it must be there.
        length = sum(len(s) + 15 for s in got)
        check(status == 0 and got == stories[:len(got)] and -40 < length - fraction * size <= 0,
              f"--fraction {fraction} gives the first whole stories of the text: {len(got)}, {length} of {size} bytes")


def test_bad_inputs(folder):
    text = write_text(f"{folder}/t.txt", STORIES)
    open(f"{folder}/empty.txt", "w").close()
    many = write_text(f"{folder}/many.txt", STORIES * 20)
    with open(f"{folder}/bad.json", "w") as f:
        f.write("{}")
    os.mkdir(f"{folder}/keep")
    good = ["--tokenizer", "bytes", "--text", text, "--val-text", text, "--out", f"{folder}/keep"]
    check(run(*good)[0] == 0, "a call with valid arguments succeeds")
    before = {name: open(f"{folder}/keep/{name}", "rb").read() for name in os.listdir(f"{folder}/keep")}
    to = ["--out", f"{folder}/keep", "--name", "tinystories_bytes"]
    cases = [
        (good, "name the shards of --text with --name"),
        (["--tokenizer", "bytes", "--text", f"{folder}/none.txt", *to], "none.txt: no such text file"),
        (["--tokenizer", "bytes", "--text", f"{folder}/empty.txt", "--val-text", text, *to], "no whole story in"),
        (["--tokenizer", "bytes", "--text", many, "--val-text", f"{folder}/empty.txt", *to],
         "no story for validation"),
        (["--tokenizer", "bytes", "--text", text, *to], "at least 50 stories"),
        (["--tokenizer", "bytes", "--text", text, "--fraction", "0.001", "--val-text", text, *to], "no whole story in"),
        ([*good, "--fraction", "0"], "a number above 0 and at most 1 is expected"),
        ([*good, "--fraction", "10"], "a number above 0 and at most 1 is expected"),
        ([*good, "--fraction", "nan"], "a number above 0 and at most 1 is expected"),
        ([*good, "--separator", "<s>"], "--separator goes with a tokenizer.json"),
        (["--tokenizer", "gpt5", "--text", text, *to], "--tokenizer gpt5: not llama3, qwen or bytes, and no file gpt5"),
        (["--tokenizer", "bytes", "--val-text", text], "--val-text goes with --text"),
        (["--text", text], "--tokenizer"),
        (["--tokenizer", "bytes", "--text", text, "--val-text", text, "--out", f"{text}/x"], "Not a directory"),
    ]
    for arguments, message in cases:
        status, output = run(*arguments)
        check(status != 0 and message in output and "Traceback" not in output,
              f"{arguments}: \"{message}\" expected, status {status}: {output}")
    story = "Once upon a time.\n<|endoftext|>\n" * 60
    foreign = f"{folder}/foreign"
    ways = (["--text", foreign], ["--text", many, foreign], ["--text", many, "--val-text", foreign])
    for i, (data, message) in enumerate((
        (b"PAR1" + bytes(99), "this is Parquet data"), (gzip.compress(story.encode()), "gunzip"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd -d"), (bz2.compress(b"a"), "bunzip2"), (b"PK\x03\x04word/", "an archive"),
        (b"%PDF-1.7\n", "a PDF file"), (b'{"text": "Once."}\n', "JSON lines"), (b'\n[\n  {"a": 1}]', "JSON lines"),
        (story.encode("utf-16"), "iconv -f UTF-16"), (story.encode("utf-16-be"), "UTF-16 text without a mark"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), (b"\n<!DOCTYPE html>", "a web page"),
        ("\u0416\u0438\u043b-\u0431\u044b\u043b. ".encode("cp1251") * 9, "this is not UTF-8"),
    )):
        with open(foreign, "wb") as f:
            f.write(data)
        status, output = run("--tokenizer", "bytes", *ways[i % 3], *to)
        check(status != 0 and message in output and "MB" not in output,
              f"{data[:20]} is refused before any work, \"{message}\" expected, status {status}: {output}")
    # -S: a Python without installed packages
    result = subprocess.run([sys.executable, "-S", SCRIPT, "--tokenizer", "llama3", "--text", text],
                            capture_output=True, text=True)
    check(result.returncode != 0 and "Run data/setup_venv.sh" in result.stderr,
          f"the error names the command that installs a missing package: {result.stderr}")
    if os.path.exists("/dev/full"):
        os.symlink("/dev/full", f"{folder}/keep/tinystories_bytes_val.bin.tmp")
        status, output = run(*good, "--name", "tinystories_bytes")
        check(status != 0 and "No space left on device" in output and "Traceback" not in output,
              f"the error names a full disk: {output}")
    after = {name: open(f"{folder}/keep/{name}", "rb").read() for name in os.listdir(f"{folder}/keep")}
    check(before == after, f"failed calls do not change the files of --out: {sorted(after)}")


def test_full_shards(folder):
    """A shard of 16-bit tokens that is full is followed by another one. The limit is lowered to 1,000 tokens."""
    stories = [f"Story {i}" + "." * (i % 90) for i in range(100)]
    text, val = write_text(f"{folder}/t.txt", stories), write_text(f"{folder}/v.txt", ["v"])
    program = ("import runpy, sys; sys.path.insert(0, sys.argv[1]); import tinystories; "
               "tinystories.SHARD_U16_TOKENS = 1000; del sys.argv[1]; %stinystories.main()")

    def prepare(change=""):
        result = subprocess.run([sys.executable, "-c", program % change, os.path.dirname(SCRIPT), "--tokenizer",
                                 "bytes", "--text", text, "--val-text", val, "--out", folder, "--name", "n"],
                                capture_output=True, text=True)
        return result.returncode, result.stdout + result.stderr

    status, output = prepare("tinystories.BATCH_CHARS = tinystories.READ_BYTES = 500; import collections, shutil; "
                             "shutil.disk_usage = lambda path: collections.namedtuple('U', 'free')(2000); ")
    check(status != 0 and "the rest of the text needs about 0.00 GB" in output and len(os.listdir(folder)) == 2,
          f"a disk without room for the rest of the text is found after the first part of it: {output}")
    status, output = prepare()
    names = sorted(name for name in os.listdir(folder) if name.startswith("n_train"))
    check(status == 0 and names == ["n_train.bin"] + [f"n_train_{i:06}.bin" for i in range(2, 7)] and
          f"'{folder}/n_train*.bin': 100 stories" in output, f"full shards are followed by others: {names}, {output}")
    shards = [read_shard(f"{folder}/{name}")[2] for name in sorted(names, key=lambda name: (len(name), name))]
    check(max(map(len, shards)) <= 1000 and all(shard[0] == 256 for shard in shards) and
          decode(sum(shards, []), 256, read_table(f"{folder}/n.tokenizer")[1]) == stories,
          f"no shard has more than 1,000 tokens, each begins with a story, and all stories are there: {names}")
    status, output = prepare()
    check(status != 0 and "n_train_00000" in output and "exists, and would be read with the new shards" in output,
          f"shards of an earlier call that the new ones would not replace are not mixed with them: {output}")


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves files, and parts of files if `ranges`. Breaks the next `breaks` responses off after `cut` bytes. Counts
    the bytes sent.
    """

    def do_GET(self):
        hub = self.server
        data = hub.files.get(os.path.basename(self.path))
        if data is None:
            self.send_error(404)
            return
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if hub.ranges else None
        start = int(asked[1]) if asked else 0
        if start >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.end_headers()
            return
        body = data[start:]
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if hub.breaks > 0:
            hub.breaks -= 1
            body = body[:hub.cut]
        try:
            self.wfile.write(body)
            hub.sent += len(body)
        except ConnectionError:
            pass  # the client closed the connection

    def log_message(self, *arguments):
        pass


def test_hub(folder):
    stories = [f"Story {i} of the hub." for i in range(20000)]
    write_text(f"{folder}/train.txt", stories)
    write_text(f"{folder}/val.txt", STORIES)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files = {"TinyStories-train.txt": open(f"{folder}/train.txt", "rb").read(),
                    "TinyStories-valid.txt": open(f"{folder}/val.txt", "rb").read()}
    server.ranges, server.breaks, server.cut, server.sent = True, 0, 0, 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    size = len(server.files["TinyStories-train.txt"])

    def prepare(name, *arguments):
        return run("--tokenizer", "bytes", "--out", f"{folder}/{name}", *arguments, HF_ENDPOINT=endpoint)

    def stories_of(name, split="train"):
        table = read_table(f"{folder}/{name}/tinystories_bytes.tokenizer")[1]
        return decode(read_shard(f"{folder}/{name}/tinystories_bytes_{split}.bin")[2], 256, table)

    status, output = prepare("whole")
    check(status == 0 and stories_of("whole") == stories and stories_of("whole", "val") == STORIES,
          f"shards of downloaded texts have their stories: {output}")
    server.sent = 0
    check(prepare("whole")[0] == 0 and server.sent == 0, "a downloaded text is not downloaded again")

    server.breaks, server.cut = 3, size // 5
    status, output = prepare("broken")
    check(status == 0 and server.breaks == 0 and stories_of("broken") == stories,
          f"a download continues after three broken connections: {output}")

    whole = server.files["TinyStories-train.txt"]  # half is there, as after a broken call: only the rest is asked for
    os.makedirs(f"{folder}/resumed")
    with open(f"{folder}/resumed/TinyStories-train.txt.part", "wb") as f:
        f.write(whole[:size // 2])
    server.sent = 0
    status, output = prepare("resumed")
    check(status == 0 and stories_of("resumed") == stories and server.sent == size - size // 2 +
          len(server.files["TinyStories-valid.txt"]),
          f"a half download is continued, {server.sent} bytes sent: {output}")

    with open(f"{folder}/resumed/TinyStories-train.txt.part", "wb") as f:  # complete but never renamed
        f.write(whole)
    os.remove(f"{folder}/resumed/TinyStories-train.txt")
    status, output = prepare("resumed")
    check(status == 0 and stories_of("resumed") == stories,
          f"a complete download under its temporary name is taken: {output}")

    status, output = prepare("tenth", "--fraction", "0.1")
    got = stories_of("tenth")
    check(status == 0 and got == stories[:len(got)] and 0.09 * size < sum(len(s) + 15 for s in got) <= 0.1 * size + 1,
          f"--fraction 0.1 gives the first tenth of the stories: {len(got)} stories, {output}")
    check(not os.path.exists(f"{folder}/tenth/TinyStories-train.txt"),
          "--fraction 0.1 leaves no file with the whole text's name")
    check(prepare("tenth")[0] == 0 and stories_of("tenth") == stories,
          "a call without --fraction after --fraction 0.1 gives all stories")

    server.ranges, server.breaks, server.cut = False, 1, size // 5
    status, output = prepare("norange")
    check(status == 0 and stories_of("norange") == stories,
          f"a server without range requests gives all stories: {output}")

    server.ranges, server.breaks, server.cut = True, 100, 0
    status, output = prepare("dead")
    check(status != 0 and "the connection ended early" in output and "Traceback" not in output,
          f"the error says that the connection ended early: {output}")
    server.breaks = 0
    del server.files["TinyStories-valid.txt"]
    status, output = prepare("missing")
    check(status != 0 and "404" in output and "Traceback" not in output,
          f"the error has the status 404 of a file that the server lacks: {output}")
    server.shutdown()
    server.server_close()
    status, output = prepare("offline")
    check(status != 0 and "Connection refused" in output and "--text FILE" in output and "Traceback" not in output,
          f"the error says that the server cannot be reached: {output}")
    check(not os.path.exists(f"{folder}/offline/tinystories_bytes_train.bin"), "a failed download leaves no shard")


def test_against_shared(folder):
    """Shards of the real text have the tokens of shards that tiktoken made, independently of this project."""
    for name, family, separator, vocabulary in (("llama3", "llama3", 128000, 128256),
                                                ("qwen", "qwen3", 151643, 151646)):
        status, output = run("--tokenizer", name, "--text", f"{SHARED}/tinystories_train.txt", "--val-text",
                             f"{SHARED}/tinystories_valid.txt",
                             "--out", folder, python=VENV_PYTHON)
        check(status == 0, output)
        table_separator, table = read_table(f"{folder}/tinystories_{name}.tokenizer")
        check((table_separator, len(table)) == (separator, vocabulary),
              f"{name}: the table has separator {separator} and {vocabulary} tokens: {table_separator}, {len(table)}")
        for split, theirs in (("train", "train"), ("val", "valid")):
            ours = read_shard(f"{folder}/tinystories_{name}_{split}.bin")
            expected = read_shard(f"{SHARED}/tinystories_{family}_{theirs}.bin")
            check(ours == expected,
                  f"{name} {split}: magic, version and tokens are equal: {len(ours[2])} and {len(expected[2])} tokens; "
                  "the first different one is "
                  f"{next((i for i, (a, b) in enumerate(zip(ours[2], expected[2])) if a != b), None)}")
            with open(f"{SHARED}/tinystories_{theirs}.txt", encoding="utf-8") as f:
                stories = [s.strip() for s in f.read().split("<|endoftext|>") if s.strip()]
            check(decode(ours[2], separator, table) == stories,
                  f"{name} {split}: the table gives the text back")


MAKE_TOKENIZER = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers
kind, text, path, special = sys.argv[1:]
tok = Tokenizer(models.BPE(byte_fallback=kind == "pieces"))
if kind == "bytelevel":
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, first = pre_tokenizers.ByteLevel.alphabet(), []
else:
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tok.decoder = decoders.Sequence([decoders.Replace("\\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    alphabet, first = [], [f"<0x{i:02X}>" for i in range(256)]
tok.train([text], trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=[special, *first],
                                      show_progress=False))
tok.save(path)
"""


def test_tokenizer_json(folder):
    text = write_text(f"{folder}/t.txt", STORIES * 3 + ["the <s> is text, \U0001f600 is new"])
    for kind, special in (("bytelevel", "<|endoftext|>"), ("pieces", "<s>"), ("bytelevel", "<sep>")):
        os.makedirs(f"{folder}/my {kind}", exist_ok=True)
        path = f"{folder}/my {kind}/tokenizer.json"
        subprocess.run([VENV_PYTHON, "-c", MAKE_TOKENIZER, kind, text, path, special], check=True)
        # The third tokenizer lies in the first one's folder. --name gives its shards the name of the first one's
        # shards, so they replace those.
        extra = ["--separator", special, "--name", f"tinystories_my_{kind}"] if special == "<sep>" else []
        status, output = run("--tokenizer", os.path.dirname(path), "--text", text, "--val-text", text, "--out", folder,
                             *extra, python=VENV_PYTHON)
        check(status == 0, output)
        separator, table = read_table(f"{folder}/tinystories_my_{kind}.tokenizer")
        magic, version, tokens = read_shard(f"{folder}/tinystories_my_{kind}_train.bin")
        check(table[separator] == special.encode() and (magic, version) == (20240520, 1),
              f"{kind}: the separator is {special}, the shard has 16-bit tokens: {table[separator]}, {magic}")
        check(decode(tokens, separator, table) == STORIES * 3 + ["the <s> is text, \U0001f600 is new"],
              f"{kind}: the table gives the text back: {decode(tokens, separator, table)[-1]!r}")
        check(max(tokens) > 260 and len(tokens) < os.path.getsize(text),
              f"{kind}: the shard has ids above 260, and fewer tokens than the text has bytes")
    status, output = run("--tokenizer", path, "--text", text, python=VENV_PYTHON)
    check(status != 0 and "--separator" in output and "Traceback" not in output,
          f"a tokenizer without a known separator is refused: {output}")
    with open(f"{folder}/bad.json", "w") as f:
        f.write("{}")
    status, output = run("--tokenizer", f"{folder}/bad.json", "--text", text, python=VENV_PYTHON)
    check(status != 0 and "not a tokenizer.json" in output and "Traceback" not in output,
          f"a bad tokenizer.json is refused: {output}")


def test_synth(folder):
    binary = f"{folder}/synth_stories"
    subprocess.run([os.environ.get("CC", "cc"), "-std=gnu11", "-O1", os.path.join(ROOT, "data", "synth_stories.c"),
                    "-o", binary, "-lm"], check=True)

    def synth(*arguments):
        result = subprocess.run([binary, *arguments], capture_output=True, text=True)
        return result.returncode, result.stdout + result.stderr

    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        status, output = synth("--out", f"{folder}/{name}", "--bytes", "300000", "--seed", seed)
        check(status == 0, output)
    read = lambda name: open(f"{folder}/{name}", "rb").read()
    check(read("a_train.bin") == read("b_train.bin") and read("a_val.bin") == read("b_val.bin"),
          "equal seeds give equal stories")
    check(read("a_train.bin") != read("c_train.bin"), "different seeds give different stories")
    separator, table = read_table(f"{folder}/a.tokenizer")
    check(separator == 256 and table == [bytes([i]) for i in range(256)] + [b"<|endoftext|>"],
          "the table has 256 bytes and the separator")
    shards = {split: read_shard(f"{folder}/a_{split}.bin") for split in ("train", "val")}
    stories = {split: decode(shards[split][2], separator, table) for split in shards}
    check(shards["train"][:2] == (20240520, 1), "the shard has magic number 20240520 and version 1")
    check(300000 <= sum(map(len, stories["train"])) < 301000 and 15000 <= sum(map(len, stories["val"])) < 16000,
          "the training text has the size of --bytes, the validation text a 20th of it, or up to 1,000 bytes more")
    check(not set(stories["train"]) & set(stories["val"]), "no validation story is in the training set")
    text = "\n".join(stories["train"])
    check(not re.search(r"[^A-Za-z .,!?:\"\n]", text),
          f"stories have only letters, blanks and punctuation: {set(text)}")
    check(not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", text),
          "\"an\" stands before vowels alone, \"a\" before other letters")
    check(not re.search(r"[.!?] [a-z]", text), "sentences begin with a capital")
    check(all(s[0].isupper() and s[-1] in ".!" and s.count('"') % 2 == 0 for s in stories["train"]),
          "each story begins with a capital, ends with a full stop or \"!\", and closes its quotes")
    words = set(re.findall(r"[a-z]+", text.lower()))
    check(len(words) >= 300, f"the stories have at least 300 different words: {len(words)}")
    for arguments, message in ((["--bytes", "0"], 'bytes "0": a whole number'), (["--bytes", "4e6"], 'bytes "4e6"'),
                               (["--seed", "-1"], 'seed "-1"'), (["x"], 'argument "x"'),
                               (["--size", "3"], "--help"), (["--out", f"{folder}/no/x"],
                                                             "cannot be created: No such file")):
        status, output = synth(*arguments)
        check(status == 1 and message in output, f"synth_stories {arguments}: {output}")
    status, output = synth("--help")
    check(status == 0 and "usage:" in output, output)


def main():
    tests = [test_bytes, test_layouts, test_split_and_fraction, test_bad_inputs, test_full_shards, test_hub, test_synth]
    have_packages = os.path.exists(VENV_PYTHON) and subprocess.run([VENV_PYTHON, "-c", "import tiktoken, tokenizers"],
                                                                   capture_output=True).returncode == 0
    if not have_packages:
        print("skipped: comparison with ../shared/data, tokenizer.json: data/.venv is missing or lacks tiktoken or "
              "tokenizers (make it with data/setup_venv.sh)")
    else:
        tests.append(test_tokenizer_json)
        if os.path.isdir(SHARED):
            tests.append(test_against_shared)
        else:
            print("skipped: comparison with ../shared/data: there is no such folder")
    for test in tests:
        with tempfile.TemporaryDirectory() as folder:
            test(folder)
    finish()


if __name__ == "__main__":
    main()
