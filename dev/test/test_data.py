#!/usr/bin/env python3
"""Tests data/prepare.py and data/synth_stories.c.

It tests sources, shards, tables, restarts, download and wrong input of prepare.py, compares its tokens with those of
../shared/data, if that is there, and tests shards, stories and wrong options of synth_stories.

Needs only the standard library. Tests that need the packages of data/requirements.txt use data/.venv/bin/python, or are
skipped with a reason. Ends with "N passed, N failed".
"""
import array
import bz2
import functools
import gzip
import http.server
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "dev", "test", "lib"))
from counted import call, check, finish  # noqa: E402

sys.path.insert(0, os.path.join(ROOT, "data"))
import prepare  # noqa: E402

SCRIPT = os.path.join(ROOT, "data", "prepare.py")
VENV_PYTHON = os.path.join(ROOT, "data", ".venv", "bin", "python")
SHARED = os.path.join(ROOT, "..", "shared", "data")
STORIES = ["Once upon a time.\n\nThe end.", "Zwei Bären spielten.", "A \"cat\" sat.\nIt was 1234 o'clock \u2603!"]


def write(path, data):
    """Writes bytes or a text to a file."""
    pathlib.Path(path).write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def run(*arguments, python=None, **environment):
    """Runs prepare.py; with another Python or environment in a process of its own."""
    if not python and not environment:
        status, output, errors = call(prepare.main, *arguments)
        return status, output + errors
    result = subprocess.run([python or sys.executable, SCRIPT, *arguments], capture_output=True, text=True,
                            timeout=300, env={**os.environ, "no_proxy": "127.0.0.1", **environment})
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
    data = pathlib.Path(path).read_bytes()
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
    return write(path, "".join(f"{s}\n<|endoftext|>\n" for s in stories))


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
    status, output = run(text, "--tokenizer", "bytes", "--val", val, "--out", f"{folder}/out", "--name", "my")
    check(status == 0 and f"{text}: 3 documents, 88 tokens, 3 of them separators" in output, output)
    separator, table = read_table(f"{folder}/out/my.tokenizer")
    check(separator == 256 and table == [bytes([i]) for i in range(256)] + [b"<|endoftext|>"],
          "the byte tokenizer's table has 256 bytes and the separator")
    magic, version, tokens = read_shard(f"{folder}/out/my_train.bin")
    expected = [t for s in STORIES for t in [256, *s.encode()]]
    check((magic, version) == (20240520, 1) and tokens == expected, "the training shard has the bytes of the text")
    check(read_shard(f"{folder}/out/my_val.bin")[2] == [256, *STORIES[0].encode()],
          "the validation shard has the bytes of the text")
    check(sorted(os.listdir(f"{folder}/out")) == ["my.tokenizer", "my_train.bin", "my_val.bin"],
          "--out has the table and the two shards, and no other file")


def test_layouts(folder):
    """Texts without a final marker, with Windows line ends, markers within a line, empty stories, a marker on the
    border of two reads, or bytes that are not UTF-8.
    """
    def tokens_of(data):
        status, output = run(write(f"{folder}/l.txt", data), "--tokenizer", "bytes", "--val", f"{folder}/v.txt",
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


def test_split(folder):
    stories = [f"Story {i}." + "x" * (i % 7) for i in range(1000)]
    one, two = write_text(f"{folder}/1.txt", stories[:600]), write_text(f"{folder}/2.txt", stories[600:])
    status, output = run(one, two, "--tokenizer", "bytes", "--out", folder, "--name", "all")
    check(status == 0, output)
    table = read_table(f"{folder}/all.tokenizer")[1]
    read = lambda name: decode(read_shard(f"{folder}/{name}")[2], 256, table)
    check(read("all_train.bin") == [s for i, s in enumerate(stories) if i % 50 != 49],
          "without --val, the training shard lacks each 50th story and has all others")
    check(read("all_val.bin") == stories[49::50], "without --val, the validation shard has each 50th story")


def write_lines(path, texts, field="text"):
    return write(path, "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))


def texts_of(folder, name, split="train"):
    """The documents of all shards of a name, in the order in which the trainers read them."""
    names = sorted(n for n in os.listdir(folder) if re.fullmatch(rf"{name}_{split}(_\d+)?\.bin", n))
    table = read_table(f"{folder}/{name}.tokenizer")[1]
    return decode(sum((read_shard(f"{folder}/{n}")[2] for n in names), []), 256, table)


def test_kinds(folder):
    """JSON lines, plain and by gzip; folders and globs; --field."""
    val = write_text(f"{folder}/v.txt", ["v"])
    os.makedirs(f"{folder}/in/deep")
    write_lines(f"{folder}/in/b.jsonl", ["b \u2603", " ", "half \ud800 pair", "<|endoftext|> stays"])
    with open(write_lines(f"{folder}/in/c.jsonl", ["c1", "c2"]), "ab") as f:
        f.write(b'\n  \n\xef\xbb\xbf{"text": "c3"}')
    write(f"{folder}/in/deep/a.jsonl.gz", gzip.compress(pathlib.Path(f"{folder}/in/c.jsonl").read_bytes()))
    os.rename(f"{folder}/in/c.jsonl", f"{folder}/c.jsonl")
    write(f"{folder}/in/d.txt.gz", gzip.compress(b'{\n"d1"\n<|endoftext|>\nd2'))  # as C may begin
    write_text(f"{folder}/in/notes.md", ["left out"])
    status, output = run(f"{folder}/in", f"{folder}/*.jsonl", "--val", val, "--tokenizer", "bytes", "--out", folder,
                         "--name", "k")
    expected = ["b \u2603", "half \ufffd pair", "<|endoftext|> stays", '{\n"d1"', "d2", *["c1", "c2", "c3"] * 2]
    check(status == 0 and texts_of(folder, "k") == expected, f"{texts_of(folder, 'k')}: {output}")
    for words in ("/in: 1 files of other names are left out", "/in: 8 documents, ", "/*.jsonl: 3 documents, 9 tokens",
                  "_train.bin: 11 documents", "of them separators", "warning: 1 documents are not valid UTF-8"):
        check(words in output, f"\"{words}\" is said: {output}")
    write_lines(f"{folder}/e.jsonl", ["e"], "body")
    status, output = run(f"{folder}/e.jsonl", "--val", val, "--tokenizer", "bytes", "--out", folder, "--name", "e",
                         "--field", "body")
    check(status == 0 and texts_of(folder, "e") == ["e"], f"--field names the field: {output}")


def check_refused(folder, message, *arguments, python=None):
    """The call ends with the message, without a traceback, and changes no file of --out."""
    before = files_of(folder)
    status, output = run(*arguments, "--out", folder, python=python)
    check(status != 0 and message in output and "Traceback" not in output,
          f"{arguments}: \"{message}\" expected, status {status}: {output}")
    check(files_of(folder) == before, f"{arguments}: a failed call does not change --out: {os.listdir(folder)}")


def test_options(folder):
    text, val = write_text(f"{folder}/t.txt", STORIES), write_text(f"{folder}/v.txt", STORIES)
    write(f"{folder}/blank.txt", " \n")
    many = write_text(f"{folder}/many.txt", STORIES * 20)
    os.mkdir(f"{folder}/keep")
    to = ["--tokenizer", "bytes", "--name", "n"]
    check(run(text, "--val", val, *to, "--out", f"{folder}/keep")[0] == 0, "a call with valid arguments succeeds")
    for message, *arguments in (
        ("none.txt: no such file", f"{folder}/none.txt", *to),
        ("holds no file named .txt, .jsonl, .parquet", f"{folder}/keep", *to),
        ("is named twice", text, "--val", f"{folder}/[t].txt", *to),
        ("no whole document for training", f"{folder}/blank.txt", "--val", val, *to),
        ("no document for validation", many, "--val", f"{folder}/blank.txt", *to),
        ("no document for validation, 3 for training: give --val with at least one, or at least 50 documents", text,
         *to),
        ("is a pipe or a device", "/dev/null", *to),
        ("--fraction goes with tinystories", text, *to, "--fraction", "0.5"),
        *(("a number above 0 and at most 1", "tinystories", "--tokenizer", "bytes", "--fraction", f)
          for f in ("0", "10", "nan")),
        ("tinystories goes with no other text", "tinystories", text, *to),
        ("--separator goes with a tokenizer.json", text, *to, "--separator", "<s>"),
        ("not llama3, qwen or bytes, and no file gpt5", text, "--tokenizer", "gpt5", "--name", "n"),
        ("name the shards with --name", text, "--tokenizer", "bytes"),
        ("a name without _train", text, "--tokenizer", "bytes", "--name", "n_train_b"),
        ("a whole number from 1 to", text, *to, "--shard-tokens", "0"),
        ("above --shard-tokens", text, "--val", val, *to, "--shard-tokens", "20"),
        ("--tokenizer", text),
    ):
        check_refused(f"{folder}/keep", message, *arguments)
    status, output = run(text, "--val", val, *to, "--out", f"{text}/x")
    check(status != 0 and "Not a directory" in output and "Traceback" not in output, output)
    # -S: a Python without installed packages
    result = subprocess.run([sys.executable, "-S", SCRIPT, text, "--tokenizer", "llama3", "--name", "n"],
                            capture_output=True, text=True)
    check(result.returncode != 0 and "Run data/setup_venv.sh" in result.stderr,
          f"the error names the command that installs a missing package: {result.stderr}")
    if os.path.exists("/dev/full"):
        os.symlink("/dev/full", f"{folder}/keep/n_val.bin.tmp")
        status, output = run(text, "--val", val, *to, "--out", f"{folder}/keep")
        check(status != 0 and "No space left on device" in output and "Traceback" not in output and
              len(os.listdir(f"{folder}/keep")) == 3, f"the error names a full disk, and nothing is left: {output}")


STORY_LINES, LINES = "Once upon a time.\n<|endoftext|>\n" * 60, '{"text": "Once."}\n'
FOREIGN = (  # name and bytes of a file, and what the refusal of it says
    ("a", bz2.compress(b"a"), "bunzip2"),
    ("a", b"PK\x03\x04word/", "an archive"), ("a", b"%PDF-1.7\n", "a PDF file"),
    ("a", b'\n[\n  {"a": 1}]', "jq -c"), ("a", STORY_LINES.encode("utf-16"), "iconv -f UTF-16"),
    ("a.jsonl", LINES.encode("utf-16-be"), "UTF-16 text without a mark"),
    ("a.txt.gz", gzip.compress(STORY_LINES.encode("utf-16")), "iconv -f UTF-16"),
    ("a", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), ("a", b"\n<!DOCTYPE html>", "web page"),
    ("a", b"\xef\xbb\xbf<!DOCTYPE html>", "web page"),
    ("a", "\u0416\u0438\u043b-\u0431\u044b\u043b. ".encode("cp1251") * 9, "this is not UTF-8"),
    ("a.txt", gzip.compress(STORY_LINES.encode()), "it is compressed by gzip; name it a.txt.gz"),
    ("a.txt", b"\x28\xb5\x2f\xfd\x04", "it is compressed by zstd; name it a.txt.zst"),
    ("a.jsonl.gz", LINES.encode(), "its name says gzip, but it is not compressed"),
    ("a.jsonl.gz", gzip.compress(LINES.encode() * 9)[:-9], "broken or cut off"),
    ("a.txt", LINES.encode(), "it is JSON lines; give it the ending .jsonl"),
    ("a.jsonl", STORY_LINES.encode(), "its name says JSON lines"),
    ("a.parquet", STORY_LINES.encode(), "says Parquet data"),
    ("a.jsonl", b'{"body": "Once.", "id": 3}\n', 'line 1 has no field "text"; name the field'),
    ("a.jsonl", b'{"text": 3}\n', 'line 1 has a field "text" that is no string but 3'),
    ("a.jsonl", LINES.encode() * 5000 + b'{"text": "cut\n' + LINES.encode(), "line 5001 is no JSON"),
    ("a.jsonl", LINES.encode() * 5000 + b"[3]\n", "line 5001 is no JSON object"),
    ("a.txt", b"", "is empty"), ("a.txt.gz", gzip.compress(b""), "is empty, 0 bytes when unpacked"),
)


def test_foreign(folder):
    """Files that cannot be what they seem to be are refused, and no shard is left."""
    many, val = write_text(f"{folder}/many.txt", STORIES * 20), write_text(f"{folder}/v.txt", STORIES)
    os.mkdir(f"{folder}/keep")
    for i, (name, data, message) in enumerate(FOREIGN):
        write(f"{folder}/{name}", data)
        ways = ([f"{folder}/{name}"], [many, f"{folder}/{name}"], [many, "--val", f"{folder}/{name}"])
        check_refused(f"{folder}/keep", message, *ways[i % 3], "--tokenizer", "bytes", "--name", "n")
    long = "sources.READ_BYTES, vocabulary.ByteTokenizer.longest = 500, 1000; "
    for name, text, message in (("a.txt", "x" * 1200, "document 1: the text up to the next <|endoftext|> is longer"),
                                ("a.jsonl", LINES + '{"text": "%s"}' % ("x" * 1200), "line 2 is longer")):
        status, output = run_changed(long, write(f"{folder}/{name}", text), "--val", val, "--tokenizer", "bytes",
                                     "--name", "n", "--out", f"{folder}/keep")
        check(status != 0 and message in output and not os.listdir(f"{folder}/keep"), f"{name}: {output}")


RUN_CHANGED = """
import os, sys
_, folder, change, *words = sys.argv
sys.argv = ["prepare.py", *words]
sys.path.insert(0, folder)
import prepare, shards, sources, vocabulary, workers
exec(change)
prepare.main()
"""


def run_changed(change, *arguments, python=sys.executable):
    """Runs prepare.py after a change of its constants or functions."""
    result = subprocess.run([python, "-c", RUN_CHANGED, os.path.dirname(SCRIPT), change, *arguments],
                            capture_output=True, text=True, timeout=300)
    return result.returncode, result.stdout + result.stderr


def test_full_shards(folder):
    """A shard that is full is followed by another one."""
    stories = [f"Story {i}" + "." * (i % 90) for i in range(100)]
    text, val = write_text(f"{folder}/t.txt", stories), write_text(f"{folder}/v.txt", ["v"])
    words = [text, "--tokenizer", "bytes", "--val", val, "--out", folder, "--name", "n", "--shard-tokens", "1000"]
    status, output = run_changed("workers.BATCH_BYTES = sources.READ_BYTES = 500; import collections, shutil; "
                                 "shutil.disk_usage = lambda path: collections.namedtuple('U', 'free')(2000)", *words)
    check(status != 0 and "the rest of the text needs about 0.00 GB" in output and
          not [n for n in os.listdir(folder) if n.endswith(".bin")],
          f"a disk without room for the rest of the text is found after the first part of it: {output}")
    status, output = run(*words)
    names = sorted(name for name in os.listdir(folder) if name.startswith("n_train"))
    check(status == 0 and names == ["n_train.bin"] + [f"n_train_{i:06}.bin" for i in range(2, 7)] and
          f"'{folder}/n_train*.bin': 100 documents" in output, f"full shards are followed by others: {names}, {output}")
    shards = [read_shard(f"{folder}/{name}")[2] for name in names]
    check(max(map(len, shards)) <= 1000 and all(shard[0] == 256 for shard in shards) and
          texts_of(folder, "n") == stories,
          f"no shard has more than 1,000 tokens, each begins with a story, and all stories are there: {names}")
    status, output = run(*words)
    check(status != 0 and "n_train_00000" in output and "exists, and would be read with the new shards" in output and
          "Traceback" not in output,
          f"shards of an earlier call that the new ones would not replace are not mixed with them: {output}")


def test_token_bits(folder):
    """Ids have 16 bits in the shards of a vocabulary of up to 65,536 tokens, and 32 bits above it."""
    text = write_text(f"{folder}/t.txt", STORIES * 20)
    for vocabulary, magic in ((48000, 20240520), (65536, 20240520), (65537, 20240801)):
        largest = f"vocabulary.ByteTokenizer.vocabulary = {vocabulary}; vocabulary.ByteTokenizer.encode = " \
                  f"lambda self, text: [{vocabulary} - 1 - byte for byte in text.encode()]"
        status, output = run_changed(largest, text, "--tokenizer", "bytes", "--out", folder, "--name", "b")
        check(status == 0, output)
        found, _, tokens = read_shard(f"{folder}/b_val.bin")
        check(found == magic and tokens == [256] + [vocabulary - 1 - byte for byte in STORIES[49 % 3].encode()],
              f"a vocabulary of {vocabulary}: {found}, {tokens}")


def files_of(folder):
    return {name: open(f"{folder}/{name}", "rb").read() for name in sorted(os.listdir(folder))}


def write_sources(folder):
    write_text(f"{folder}/a.txt", [f"Story {i} of a." * (1 + i % 5) for i in range(700)])
    write_lines(f"{folder}/b.jsonl", [f"Story {i} of b." for i in range(900)])
    return [f"{folder}/a.txt", f"{folder}/b.jsonl", "--tokenizer", "bytes", "--name", "n", "--shard-tokens", "9000"]


SMALL = "prepare.SMALL_INPUT, workers.BATCH_BYTES, sources.READ_BYTES = 0, 2000, 3000\n"


def test_processes(folder):
    """Any number of processes gives the same bytes. A killed one ends the program, and the same command goes on."""
    words = write_sources(folder)
    for n in ("1", "3"):
        status, output = run_changed(SMALL, *words, "--out", f"{folder}/{n}", "--processes", n)
        check(status == 0 and len(os.listdir(f"{folder}/{n}")) > 5, f"{n} processes: {output}")
    check(files_of(f"{folder}/1") == files_of(f"{folder}/3"), "1 and 3 processes give the same files")
    kill = ("add = prepare.Run.add\n"
            "def add_and_kill(run, batch, encoded):\n"
            "    add(run, batch, encoded)\n"
            "    if run.saved and run.position[0] == 1:\n"
            "        import multiprocessing\n"
            "        for process in multiprocessing.active_children()[:1]: process.kill()\n"
            "prepare.Run.add = add_and_kill\n")
    status, output = run_changed(SMALL + kill, *words, "--out", f"{folder}/k", "--processes", "2")
    check(status != 0 and "a process that tokenizes was killed" in output and "Traceback" not in output and
          not [name for name in os.listdir(f"{folder}/k") if name.endswith(".bin")],
          f"a killed process ends the program, and no shard has its name: {output}")
    status, output = run_changed(SMALL, *words, "--out", f"{folder}/k", "--processes", "2")
    check(status == 0 and "going on after document" in output and files_of(f"{folder}/k") == files_of(f"{folder}/1"),
          f"the same command goes on and gives the same files: {output}")


def test_restart(folder):
    """A run that is killed goes on where it last saved, and gives the bytes of a run that was not."""
    words = write_sources(folder)
    check(run(*words, "--out", f"{folder}/whole")[0] == 0, "the run without a break succeeds")
    out, whole = ["--out", f"{folder}/out"], files_of(f"{folder}/whole")
    die = (SMALL + "add = prepare.Run.add\n"
           "def add_and_die(run, batch, encoded):\n"
           "    add(run, batch, encoded)\n"
           "    if run.saved and run.position[0] == %d and run.position[1] > 500: os.kill(os.getpid(), 9)\n"
           "prepare.Run.add = add_and_die\n")
    for place in (0, 1):
        status, output = run_changed(die % place, *words, *out)
        names = os.listdir(f"{folder}/out")
        check(status == -9 and "n.state" in names and not [n for n in names if n.endswith(".bin")],
              f"killed within source {place}, no shard has its name: {status}, {sorted(names)}, {output}")
    for change, message in ((["--shard-tokens", "9001"], "had --shard-tokens 9000, this one has 9001"),
                            (["--field", "body"], 'no field "body"')):
        status, output = run(*words, *out, *change)
        check(status != 0 and message in output, f"other settings are refused, \"{message}\": {output}")
    with open(f"{folder}/b.jsonl", "a") as f:
        f.write("\n")
    status, output = run(*words, *out)
    check(status != 0 and "the sources changed since the run broke off" in output and "n.state" in output, output)
    os.truncate(f"{folder}/b.jsonl", os.path.getsize(f"{folder}/b.jsonl") - 1)
    publish = SMALL + ("def publish(paths):\n"
                       "    os.replace(paths[0] + '.tmp', paths[0])\n"
                       "    os.kill(os.getpid(), 9)\n"
                       "prepare.publish = publish\n")
    status, output = run_changed(publish, *words, *out)
    check(status == -9 and "going on after document" in output, f"killed while it renames: {status}, {output}")
    status, output = run(*words, *out)
    check(status == 0 and files_of(f"{folder}/out") == whole,
          f"the files are those of a run without a break: {output}, {sorted(files_of(f'{folder}/out'))}")


MAKE_PACKED = """
import sys
import pyarrow, pyarrow.parquet
folder, texts = sys.argv[1], ["one", "two \u2603", "", "four"]
lines = "".join('{"text": "%s"}\\n' % text for text in texts).encode()
for name, data in (("a.jsonl.zst", lines), ("cut.jsonl.zst", lines * 5000)):
    with pyarrow.CompressedOutputStream(f"{folder}/{name}", "zstd") as f:
        f.write(data)
write = lambda name, columns: pyarrow.parquet.write_table(pyarrow.table(columns), f"{folder}/{name}", row_group_size=2)
write("a.parquet", {"id": [1, 2, 3, 4], "text": texts})
write("words.parquet", {"text": pyarrow.array(texts).dictionary_encode()})
write("numbers.parquet", {"text": [1, 2, 3]})
write("other.parquet", {"body": texts})
write("null.parquet", {"text": ["one", "two", None]})
"""


def test_packages(folder):
    """JSON lines by zstd, and Parquet; what is wrong with them."""
    subprocess.run([VENV_PYTHON, "-c", MAKE_PACKED, folder], check=True)
    val = write_text(f"{folder}/v.txt", ["v"])
    os.mkdir(f"{folder}/keep")
    words = ["--val", val, "--tokenizer", "bytes", "--name", "n"]
    for change, n in (("", "1"), (SMALL, "2")):
        paths = [f"{folder}/{name}" for name in ("a.jsonl.zst", "a.parquet", "words.parquet")]
        status, output = run_changed(change, *paths, *words, "--out", f"{folder}/{n}", "--processes", n,
                                     python=VENV_PYTHON)
        check(status == 0 and texts_of(f"{folder}/{n}", "n") == ["one", "two \u2603", "four"] * 3, f"{n}: {output}")
    os.truncate(f"{folder}/cut.jsonl.zst", os.path.getsize(f"{folder}/cut.jsonl.zst") - 5)
    shutil.copy(f"{folder}/a.parquet", f"{folder}/short.parquet")
    os.truncate(f"{folder}/short.parquet", 200)
    os.rename(f"{folder}/other.parquet", f"{folder}/other")
    for name, message in (("cut.jsonl.zst", "broken or cut off: Truncated"), ("short.parquet", "broken or cut off"),
                          ("numbers.parquet", 'the column "text" is of type int64, not text'),
                          ("other", 'has no column "text"; name the column of the text with --field; it has: body'),
                          ("null.parquet", "row 3 has no text: text is null")):
        check_refused(f"{folder}/keep", message, f"{folder}/{name}", *words, python=VENV_PYTHON)
    status, output = run_changed("sources.ROW_GROUP_BYTES = 20", f"{folder}/a.parquet", *words, "--out", folder,
                                 python=VENV_PYTHON)
    check(status != 0 and "a.parquet: row group 1 has" in output, f"a large row group is refused: {output}")


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
        return run("tinystories", "--tokenizer", "bytes", "--out", f"{folder}/{name}", *arguments, HF_ENDPOINT=endpoint)

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
    write(f"{folder}/resumed/TinyStories-train.txt.part", whole[:size // 2])
    server.sent = 0
    status, output = prepare("resumed")
    check(status == 0 and stories_of("resumed") == stories and server.sent == size - size // 2 +
          len(server.files["TinyStories-valid.txt"]),
          f"a half download is continued, {server.sent} bytes sent: {output}")

    write(f"{folder}/resumed/TinyStories-train.txt.part", whole)  # complete but never renamed
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
    length = sum(len(s) + 15 for s in got)  # the limit may lie within a story: that one is left out
    check(-40 < length - 0.1 * size <= 1, f"--fraction leaves out no whole story: {length} of {size} bytes")
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
    check(status != 0 and "Connection refused" in output and "text files of your own" in output and
          "Traceback" not in output, f"the error says that the server cannot be reached: {output}")
    check(not os.path.exists(f"{folder}/offline/tinystories_bytes_train.bin"), "a failed download leaves no shard")


def test_against_shared(folder):
    """Shards of the real text have the tokens of shards that tiktoken made, independently of this project."""
    for name, family, separator, vocabulary in (("llama3", "llama3", 128000, 128256),
                                                ("qwen", "qwen3", 151643, 151646)):
        status, output = run(f"{SHARED}/tinystories_train.txt", "--val", f"{SHARED}/tinystories_valid.txt",
                             "--tokenizer", name, "--out", folder, "--name", name, python=VENV_PYTHON)
        check(status == 0, output)
        table_separator, table = read_table(f"{folder}/{name}.tokenizer")
        check((table_separator, len(table)) == (separator, vocabulary),
              f"{name}: the table has separator {separator} and {vocabulary} tokens: {table_separator}, {len(table)}")
        for split, theirs in (("train", "train"), ("val", "valid")):
            ours = read_shard(f"{folder}/{name}_{split}.bin")
            expected = read_shard(f"{SHARED}/tinystories_{family}_{theirs}.bin")
            check(ours == expected,
                  f"{name} {split}: magic, version and tokens are equal: {len(ours[2])} and {len(expected[2])} tokens; "
                  "the first different one is "
                  f"{next((i for i, (a, b) in enumerate(zip(ours[2], expected[2])) if a != b), None)}")
            text = pathlib.Path(SHARED, f"tinystories_{theirs}.txt").read_text(encoding="utf-8")
            stories = [s.strip() for s in text.split("<|endoftext|>") if s.strip()]
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
    val = write_text(f"{folder}/v.txt", STORIES[:1])
    for kind, special in (("bytelevel", "<|endoftext|>"), ("pieces", "<s>"), ("bytelevel", "<sep>")):
        os.makedirs(f"{folder}/my {kind}", exist_ok=True)
        path = f"{folder}/my {kind}/tokenizer.json"
        subprocess.run([VENV_PYTHON, "-c", MAKE_TOKENIZER, kind, text, path, special], check=True)
        # The third tokenizer lies in the first one's folder, and its shards replace those of the first one.
        extra = ["--separator", special] if special == "<sep>" else []
        status, output = run(text, "--val", val, "--tokenizer", os.path.dirname(path), "--out", folder, "--name",
                             f"my_{kind}", *extra, python=VENV_PYTHON)
        check(status == 0, output)
        separator, table = read_table(f"{folder}/my_{kind}.tokenizer")
        magic, version, tokens = read_shard(f"{folder}/my_{kind}_train.bin")
        check(table[separator] == special.encode() and (magic, version) == (20240520, 1),
              f"{kind}: the separator is {special}, the shard has 16-bit tokens: {table[separator]}, {magic}")
        check(decode(tokens, separator, table) == STORIES * 3 + ["the <s> is text, \U0001f600 is new"],
              f"{kind}: the table gives the text back: {decode(tokens, separator, table)[-1]!r}")
        check(max(tokens) > 260 and len(tokens) < os.path.getsize(text),
              f"{kind}: the shard has ids above 260, and fewer tokens than the text has bytes")
        check("warning" not in output, f"{kind}: keeps the text: {output}")
    changed = {**json.loads(pathlib.Path(path).read_text()), "normalizer": {"type": "Lowercase"}}
    changed = write(f"{folder}/low.json", json.dumps(changed))
    output = run(val, "--val", text, "--tokenizer", changed, "--separator", "<sep>", "--name", "n", "--out", folder,
                 python=VENV_PYTHON)[1]
    check("its tokens make 'one  and\\ntwo'" in output, f"a tokenizer that changes text is named: {output}")
    status, output = run(text, "--tokenizer", path, "--name", "n", python=VENV_PYTHON)
    check(status != 0 and "--separator" in output and "Traceback" not in output,
          f"a tokenizer without a known separator is refused: {output}")
    status, output = run(text, "--tokenizer", write(f"{folder}/bad.json", "{}"), "--name", "n", python=VENV_PYTHON)
    check(status != 0 and "not a tokenizer.json" in output and "Traceback" not in output,
          f"a bad tokenizer.json is refused: {output}")


READ_TOKENIZER = """
import json, sys, tokenizers
t = tokenizers.Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
print(json.dumps([t.encode(text).ids for text in json.loads(sys.argv[2])]))
"""


def test_export_tokenizer(folder):
    """The tokenizer that transformers gets has the ids of the shards, the separator first."""
    texts = STORIES + ["a\r\n\n  b 12345 \u00e9\u4e2d don't I'LL <|x|> \U0001f600 x_y\t#!"]
    text, val = write_text(f"{folder}/t.txt", texts), write_text(f"{folder}/v.txt", STORIES[:1])
    for name in ("bytes", "llama3", "qwen"):
        words = [text, "--tokenizer", name, "--out", folder, "--name", name, "--val", val]
        check(run(*words, python=VENV_PYTHON)[0] == 0, f"{name}: shards are made")
        os.makedirs(f"{folder}/hf_{name}")
        shutil.copy(f"{folder}/{name}.tokenizer", f"{folder}/hf_{name}/tokens.tokenizer")
        command = [sys.executable, os.path.join(ROOT, "data/export_tokenizer.py"), f"{folder}/hf_{name}"]
        check(subprocess.run(command, capture_output=True).returncode == 0, f"{name}: tokenizer.json is made")
        again = subprocess.run(command, capture_output=True, text=True)
        check(again.returncode == 1 and "is there already" in again.stderr, f"{name}: none is replaced {again.stderr}")
        read = subprocess.run([VENV_PYTHON, "-c", READ_TOKENIZER, command[2], json.dumps(texts)], capture_output=True)
        ids = [i for one in json.loads(read.stdout or "[]") for i in one]
        check(ids == read_shard(f"{folder}/{name}_train.bin")[2], f"{name}: its ids are the shard's {read.stderr}")
    write(f"{folder}/tokens.tokenizer", pathlib.Path(f"{folder}/bytes.tokenizer").read_bytes()[:-3])
    cut = subprocess.run([*command[:2], folder], capture_output=True, text=True)
    check(cut.returncode == 1 and "table is damaged" in cut.stderr, f"a damaged table is refused: {cut.stderr}")


CHATML = """{%- for m in messages %}
    {%- if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}{%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- generation %}{{ m.content + '<|im_end|>\\n' }}{%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
# With the separator at its begin, another end token in each turn, and white space removed, as Llama 3's.
LLAMA = """{{- bos_token }}
{%- for m in messages %}<h>{{ m.role }}</h>{{ m.content | trim }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}<h>assistant</h>{% endif %}"""
# Like Qwen3's: an answer that is the last message is written otherwise.
THINK = CHATML.replace("m.content", "('<think></think>' if loop.last and m.role == 'assistant' else '') + m.content")
ADD_TOKENS = """
import sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<h>", "</h>"])
tokenizer.save(sys.argv[1])
"""
CHATS = [[("user", "Who sat?"), ("assistant", " A \"cat\" sat.\n")],
         [("system", "Be \u2603."), ("user", "Once upon?"), ("assistant", "a time."), ("user", "The end?"),
          ("assistant", "\n\nZwei B\u00e4ren.\n")]]


def write_chats(path, chats):
    with open(path, "w", encoding="utf-8") as f:
        for chat in chats:
            messages = [{"role": role, "content": text} for role, text in chat]
            f.write(json.dumps({"id": 3, "messages": messages}) + "\n \n")
    return path


def chats_of(folder):
    """Returns the text of training shards with a mask, its parts that count, joined by |, and how many tokens count."""
    table, text, counted, number = read_table(f"{folder}/n.tokenizer")[1], b"", b"", 0
    for name in sorted(n for n in os.listdir(folder) if n.startswith("n_train")):
        magic, version, tokens = read_shard(f"{folder}/{name}")
        check((magic, version) == (20240801, 9), f"a shard of chats declares a mask: {magic}, {version}")
        for token in tokens:
            text += table[token & 0x7fffffff]
            counted += b"|" if token >> 31 else table[token]
            number += not token >> 31
    return text.decode(), re.sub(r"\|+", "|", counted.decode()).strip("|"), number


def test_chat(folder):
    """Chats are written by the template; the assistant's messages with their end tokens count, and nothing else."""
    os.makedirs(f"{folder}/model/keep")
    model, config = f"{folder}/model", f"{folder}/model/tokenizer_config.json"
    subprocess.run([VENV_PYTHON, "-c", MAKE_TOKENIZER, "bytelevel", write_text(f"{folder}/t.txt", STORIES * 9),
                    f"{model}/tokenizer.json", "<|endoftext|>"], check=True)
    subprocess.run([VENV_PYTHON, "-c", ADD_TOKENS, f"{model}/tokenizer.json"], check=True)
    chats, val = write_chats(f"{folder}/c.jsonl", CHATS * 60), write_chats(f"{folder}/v.jsonl", CHATS)
    write(f"{folder}/d.jsonl.gz", gzip.compress(pathlib.Path(chats).read_bytes()))
    words = ["--chat", "--val", val, "--tokenizer", model, "--name", "n"]
    refused = functools.partial(check_refused, f"{model}/keep", python=VENV_PYTHON)
    refused("tokenizer_config.json; copy one of them there", chats, *words)

    write(config, '{"chat_template": "')
    refused("tokenizer_config.json: is no JSON object", chats, *words)

    def set_template(text):
        write(config, json.dumps({"chat_template": text, "bos_token": "<|endoftext|>",
                                  "eos_token": {"content": "<|im_end|>"}}))

    for name, template in (("chatml", CHATML), ("llama", LLAMA)):
        set_template(template)
        for n in ("1", "2"):
            status, output = run_changed(SMALL, chats, f"{folder}/d.jsonl.gz", *words, "--out", f"{folder}/{name}{n}",
                                         "--processes", n, "--shard-tokens", "5000", python=VENV_PYTHON)
            check(status == 0, f"{name}, {n} processes: {output}")
        check(files_of(f"{folder}/{name}1") == files_of(f"{folder}/{name}2"), f"{name}: processes do not matter")
        text, counted, number = chats_of(f"{folder}/{name}1")
        check(f"240 of them separators, {number} count in the loss\n" in output, f"the counted tokens: {output}")
        strip, line = (str.strip, "") if name == "llama" else (str, "\n")
        begin, end = ("<h>%s</h>", "<|im_end|>") if name == "llama" else ("<|im_start|>%s\n", "<|im_end|>\n")
        whole = "".join("<|endoftext|>" + "".join(begin % role + strip(said) + end for role, said in chat)
                        for chat in CHATS)
        answers = [strip(said) + "<|im_end|>" for chat in CHATS for role, said in chat if role == "assistant"]
        check(text == whole * 120, f"{name}: the template gives the text: {text[:300]!r}")
        check(counted == "|".join(answers * 120), f"{name}: answers count: {counted[:300]!r}")
    die = SMALL + ("add = prepare.Run.add\n"
                   "def add_and_die(run, batch, encoded):\n"
                   "    add(run, batch, encoded)\n"
                   "    if run.saved: os.kill(os.getpid(), 9)\n"
                   "prepare.Run.add = add_and_die\n")
    again = [chats, f"{folder}/d.jsonl.gz", *words, "--shard-tokens", "5000", "--out", f"{folder}/again"]
    check(run_changed(die, *again, python=VENV_PYTHON)[0] == -9, "the run is killed")
    status, output = run(*again, python=VENV_PYTHON)
    check("going on after" in output and files_of(f"{folder}/again") == files_of(f"{folder}/llama1") and
          f", {number} count in the loss\n" in output,
          f"a run that broke off goes on: {output}")
    write(f"{model}/chat_template.jinja", THINK)  # it goes before tokenizer_config.json
    refused("line 3 cannot be masked: the chat template does not write messages 1 to 3 as", chats, *words)
    for broken, message in (("{% if %}", "the chat template is broken: Expected an expression"),
                            ("{{ raise_exception('no') }}", "chat template: no"),
                            ("{{ strftime_now('%Y') }}", "chat template: 'strftime_now' is undefined")):
        write(f"{model}/chat_template.jinja", broken)
        refused(message, chats, *words)
    os.remove(f"{model}/chat_template.jinja")
    for record, message in (
            ('{"messages": "Hello"}', "line 3 has no list of messages"), ('{"messages": []}', "no message of the assi"),
            ('{"text": "Hello"}', 'line 3 has no field "messages"; name the field of the messages with --field'),
            ('{"messages": [{"role": "user", "content": null}]}', 'line 3 has a message 1 without a string "content"'),
            ('{"messages": [{"role": "human", "content": "a"}]}', 'line 3 has a message 1 of the role "human", not'),
            ('{"messages": [{"role": "user", "content": "a"}]}', "line 3 has no message of the assistant"),
            ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "surrogates not allowed")):
        with open(write_chats(f"{folder}/bad.jsonl", CHATS[:1]), "a") as f:
            f.write(record)
        refused(message, f"{folder}/bad.jsonl", *words)
    refused("t.txt: is UTF-8 text", f"{folder}/t.txt", *words)
    refused("--chat takes the folder", chats, *words[:3], "--tokenizer", "bytes", "--name", "n")
    refused("--chat does not go with tinystories", "tinystories", "--chat", "--tokenizer", model)


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
    tests = [test_bytes, test_layouts, test_split, test_kinds, test_options, test_foreign, test_full_shards,
             test_token_bits, test_processes, test_restart, test_hub, test_synth]
    have_packages = os.path.exists(VENV_PYTHON) and subprocess.run(
        [VENV_PYTHON, "-c", "import jinja2, pyarrow, tiktoken, tokenizers"], capture_output=True).returncode == 0
    if not have_packages:
        print("skipped: .jsonl.zst, .parquet, comparison with ../shared/data, tokenizer.json, --chat: data/.venv is "
              "missing or lacks jinja2, pyarrow, tiktoken or tokenizers (make it with data/setup_venv.sh)")
    else:
        tests += [test_packages, test_tokenizer_json, test_export_tokenizer, test_chat]
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
