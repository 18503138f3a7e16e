#!/usr/bin/env python3
"""Makes token shards and the tokenizer table from text.

    data/prepare.py tinystories --tokenizer llama3               TinyStories (Eldan and Li 2023), from Hugging Face
    data/prepare.py tinystories --tokenizer qwen --fraction 0.1      downloads a tenth of the training text
    data/prepare.py a.jsonl.zst folder 'b/*.parquet' --tokenizer llama3 --name my --field text

Reads .txt (a line <|endoftext|> between documents), .jsonl, .parquet, the first two also as .gz or .zst, folders of
them with all folders within, and globs. Writes OUT/NAME_train.bin, NAME_train_000002.bin ... and NAME_val.bin ...
(format: llmc/data/dataloader.h), which --train-data 'OUT/NAME_train*.bin' reads, and OUT/NAME.tokenizer
(llmc/data/tokenizer.h). White space at both ends of a document is removed, and a separator token stands before it:
Llama 3 <|begin_of_text|> 128000, Qwen <|endoftext|> 151643, bytes 256. The same command goes on with a run that broke
off, and gives the same bytes, as does any number of processes. With --chat each record is a chat (data/README.md).
Tokenizers other than bytes, .zst and .parquet need packages: run data/setup_venv.sh, then data/.venv/bin/python.
"""

import argparse
import contextlib
import os
import re
import shutil
import struct
import sys
import time
import zlib

from hub import HUB_TRAIN, HUB_VAL, download
from problems import BadInput, Interrupted
from progress import Progress
from shards import LARGEST_SHARD, Shards, State, publish, refuse_old_shards, token_kind, write_table
from sources import expand, judge
from vocabulary import MARK, JsonTokenizer, open_tokenizer
from workers import encode_all, make_batches

HUB = "tinystories"
VAL_EVERY = 50  # without validation text, each 50th document is validation
SMALL_INPUT = 4 << 20  # bytes for which starting processes takes longer than the work
SAVE_SECONDS = 10
PROBE = "One  and\ntwo"  # some tokenizers change spaces, ends of lines or capitals


def hub_files(options):
    os.makedirs(options.out, exist_ok=True)
    train = download(HUB_TRAIN, options.out, options.fraction)
    val = download(HUB_VAL, options.out, 1)
    return [judge(path, i, split, options.field, limit, size)
            for i, (split, (path, limit, size)) in enumerate((("val", val), ("train", train)))]


def find_files(options):
    """Returns the files in the order in which they are read, and the arguments that named them.

    Validation comes first: it is short, so what is wrong with it costs no hours.
    """
    if options.paths == [HUB]:
        return hub_files(options), [HUB_VAL, HUB_TRAIN]
    arguments = [(a, "val") for a in options.val] + [(a, "train" if options.val else "") for a in options.paths]
    files, seen = [], {}
    for i, (argument, split) in enumerate(arguments):
        paths, left_out = expand(argument)
        if left_out:
            print(f"{argument}: {left_out} files of other names are left out", file=sys.stderr)
        for path in paths:
            if (real := os.path.realpath(path)) in seen:
                raise BadInput(f"{path}: is named twice, by {seen[real]} and by {argument}")
            seen[real] = argument
            files.append(judge(path, i, split, options.field, chat=options.chat))
    return files, [a for a, _ in arguments]


def describe_sources(files, arguments):
    """Returns [argument, files, bytes, checksum of what is known of them] of each argument."""
    rows = [[a, 0, 0, 0] for a in arguments]
    for file in files:
        row = rows[file.argument]
        words = f"{file.path} {file.size} {file.limit} {file.head} {file.split}"
        row[1:] = row[1] + 1, row[2] + file.size, zlib.crc32(words.encode("utf-8", "surrogateescape"), row[3])
    return rows


class Run:
    """The shards of a run, and how far it is."""

    def __init__(self, options, tokenizer, files, arguments):
        self.prefix = os.path.join(options.out, options.name or f"{HUB}_{tokenizer.name}")
        self.tokenizer, self.kind, self.arguments = tokenizer, token_kind(tokenizer), arguments
        self.total = sum(file.limit for file in files)
        settings = {"--tokenizer": tokenizer.identity, "--separator": tokenizer.separator, "--field": options.field,
                    "--shard-tokens": options.shard_tokens}
        self.state = State(self.prefix, settings, describe_sources(files, arguments))
        saved = self.state.load()
        self.saved, self.complete = bool(saved), bool(saved) and saved["complete"]
        start = saved or {"position": [0, 0], "counts": [[0, 0] for _ in arguments], "undecodable": 0, "either": 0}
        self.position, self.counts = start["position"], start["counts"]
        self.undecodable, self.either = start["undecodable"], start["either"]
        self.train, self.val = self.splits = [
            Shards(f"{self.prefix}_{split}", tokenizer, options.shard_tokens, start.get(split))
            for split in ("train", "val")
        ]
        self.saved_at, self.saved_shards = time.monotonic(), 2

    def start(self):
        if not self.saved:
            refuse_old_shards(self.prefix)
        for shards in self.splits:
            shards.open_last(self.saved)

    def tokens(self):
        return sum(tokens for _, tokens in self.counts)

    def add(self, batch, encoded):
        at, tokens = 0, memoryview(encoded.tokens)
        for (file, *_), lengths in zip(batch.segments, encoded.lengths):
            for length in lengths:
                self.shards_of(file).add(tokens[at : at + length])
                at += length
            documents, before = self.counts[file.argument]
            self.counts[file.argument] = [documents + len(lengths), before + sum(lengths)]
        self.undecodable += encoded.undecodable
        self.position = batch.position
        self.check_room(batch.done)
        shards = len(self.train.counts) + len(self.val.counts)
        if shards > self.saved_shards or time.monotonic() - self.saved_at >= SAVE_SECONDS:
            self.saved_shards = shards
            self.save()

    def shards_of(self, file):
        """The shards that take the next document of a file."""
        if file.split == "train" and not self.val.documents:
            self.refuse_empty(self.val)
        self.either += not file.split
        is_val = file.split == "val" or not file.split and self.either % VAL_EVERY == 0
        return self.val if is_val else self.train

    def refuse_empty(self, shards):
        if shards is self.train:
            raise BadInput(f"no whole document for training in {', '.join(self.arguments)}")
        raise BadInput(f"no document for validation, {self.train.documents} for training: give --val with at least "
                       f"one, or at least {VAL_EVERY} documents (in text a line {MARK.decode()} ends a document)")

    def check_room(self, done):
        """Ends the program if the disk has no room for the rest of the text. Hours of work would be lost at its end."""
        need = self.tokens() * struct.calcsize(self.kind) * (self.total / done - 1) if done else 0
        room = shutil.disk_usage(os.path.dirname(self.prefix) or ".").free
        if need > room:
            words = f"the rest of the text needs about {need / 1e9:.2f} GB, and {room / 1e9:.2f} are free"
            raise Interrupted(f"{self.prefix}: {words}")

    def save(self):
        self.state.save(train=self.train.progress(), val=self.val.progress(), position=self.position,
                        counts=self.counts, undecodable=self.undecodable, either=self.either, complete=self.complete)
        self.saved, self.saved_at = True, time.monotonic()

    def finish(self):
        for shards in (self.val, self.train):
            if not shards.documents:
                self.refuse_empty(shards)
        for shards in self.splits:
            shards.close()
        write_table(f"{self.prefix}.tokenizer.tmp", self.tokenizer)
        self.complete = True
        self.save()

    def publish(self):
        publish([*self.train.paths(), *self.val.paths(), f"{self.prefix}.tokenizer"])
        self.state.remove()

    def discard(self):
        for shards in self.splits:
            shards.discard()
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{self.prefix}.tokenizer.tmp")
        self.state.remove()

    def print_counts(self):
        for argument, (documents, tokens) in zip(self.arguments, self.counts):
            print(f"{argument}: {documents} documents, {tokens} tokens, {documents} of them separators")
        for shards in self.splits:
            shards.print_counts()
        tokenizer = self.tokenizer
        print(f"{self.prefix}.tokenizer: {tokenizer.vocabulary} tokens, separator {tokenizer.separator}")
        if isinstance(tokenizer, JsonTokenizer) and PROBE not in (spelled := tokenizer.spell(PROBE)):
            words = f"does not keep text as it is: of {PROBE!r} its tokens make {spelled!r}"
            print(f"warning: --tokenizer {tokenizer.name} {words}; the trainer's samples and bits per byte are of that",
                  file=sys.stderr)
        if self.undecodable:
            words = "documents are not valid UTF-8; their invalid bytes were replaced by U+FFFD"
            print(f"warning: {self.undecodable} {words}", file=sys.stderr)


def write_all(run, files, options):
    """Tokenizes all text from the run's position on."""
    processes = options.processes or (1 if options.tokenizer == "bytes" else len(os.sched_getaffinity(0)))
    processes = 1 if run.total < SMALL_INPUT else processes
    if run.saved:
        done = run.train.documents + run.val.documents
        print(f"{run.state.path}: going on after document {done}, {run.tokens()} tokens", file=sys.stderr)
    progress, done = Progress("tokenize"), 0
    batches = make_batches(files, options.field, run.tokenizer.longest, run.position)
    with contextlib.closing(encode_all(batches, run.tokenizer, options, processes)) as encoded_batches:
        for batch, encoded in encoded_batches:
            run.add(batch, encoded)
            done = batch.done
            progress.show(done, run.total, f" | {run.tokens()} tokens")
    progress.done(done, run.total, f" | {run.tokens()} tokens")
    run.finish()


def prepare(options):
    tokenizer = open_tokenizer(options.tokenizer, options.separator, options.chat)
    files, arguments = find_files(options)
    os.makedirs(options.out, exist_ok=True)
    run = Run(options, tokenizer, files, arguments)
    if not run.complete:
        try:
            run.start()
            write_all(run, files, options)
        except BadInput:
            run.discard()
            raise
        except BaseException:
            if not run.saved:
                run.discard()
            raise
    run.publish()
    run.print_counts()


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


def whole_number(largest):
    def parse(text):
        value = int(text) if re.fullmatch(r"\d{1,12}", text) else 0
        if not 0 < value <= largest:
            raise argparse.ArgumentTypeError(f'"{text}": a whole number from 1 to {largest} is expected')
        return value

    return parse


def parse_name(text):
    """A name within which _train stands would make a pattern such as x_train*.bin match the shards of two corpora."""
    if not text or re.search(r"_train|_val|[/*?\[\],]", text):
        raise argparse.ArgumentTypeError(
            f'"{text}": a name without _train, _val, slashes, commas and wildcards is expected; --out is the folder'
        )
    return text


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, here = parser.add_argument, os.path.dirname(os.path.abspath(__file__))
    add("paths", nargs="+", metavar="PATH", help=f"files, folders or globs of training text; or {HUB}")
    add("--tokenizer", required=True, metavar="NAME",
        help="llama3, qwen, bytes, or the path of a model's tokenizer.json (or of its folder)")
    add("--name", type=parse_name, help=f"name of the shards; needed, but with {HUB} ({HUB}_TOKENIZER)")
    add("--val", nargs="+", metavar="PATH", default=[],
        help=f"validation text; without it, each {VAL_EVERY}th document is validation")
    add("--field", help="the field of JSON lines, or the column, that is the text (text; with --chat: messages)")
    add("--chat", action="store_true", help="each JSON line is a chat, a list of {role, content}: it is written by the "
        "chat template in the tokenizer's folder, and the assistant's messages alone count in the loss")
    add("--fraction", type=parse_fraction, metavar="F",
        help=f"only the first part of the training text of {HUB}, by bytes, up to its last whole document (1.0)")
    add("--out", default=here, metavar="DIR", help="where to write, and where downloads are kept (%(default)s)")
    add("--separator", metavar="TOKEN", help="with a tokenizer.json: the token before each document (the first that it "
        "has of <|begin_of_text|>, <|endoftext|>, <s>, <bos>)")
    add("--shard-tokens", type=whole_number(LARGEST_SHARD), default=100_000_000, metavar="N",
        help="the most tokens of a shard (%(default)s)")
    add("--processes", type=whole_number(1024), metavar="N",
        help=f"processes that tokenize ({len(os.sched_getaffinity(0))}, the cores; for bytes 1, since passing text on "
        "takes longer than that work)")
    return parser


def parse_options():
    parser = make_parser()
    options = parser.parse_args()
    is_hub = options.paths == [HUB]
    if HUB in options.paths and (not is_hub or options.val):
        parser.error(f"{HUB} goes with no other text; a folder of that name is ./{HUB}")
    if options.chat and is_hub:
        parser.error(f"--chat does not go with {HUB}")
    if options.fraction and not is_hub:
        parser.error(f"--fraction goes with {HUB}")
    if not options.name and not is_hub:
        parser.error("name the shards with --name")
    options.fraction = options.fraction or 1.0
    options.field = options.field or ("messages" if options.chat else "text")
    return options


def main():
    options = parse_options()
    go_on = "run the same command again to go on from the last saved state, if there is one"
    try:
        prepare(options)
    except BadInput as e:
        sys.exit(f"error: {e}")
    except Interrupted as e:
        sys.exit(f"error: {e}; {go_on}")
    except OSError as e:
        sys.exit(f"error: {e.filename or 'reading text or writing to ' + options.out}: {e.strerror or e}; {go_on}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; {go_on}")


if __name__ == "__main__":
    main()
