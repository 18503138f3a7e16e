"""Tokenizes batches of records in several processes. The results come in the order of the batches, whatever the number
of processes.
"""

import array
import collections
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from problems import BadInput, Interrupted
from shards import token_kind
from sources import CHATS, TEXT, Records, record_text, refuse_record
from vocabulary import open_tokenizer

BATCH_BYTES = 1 << 20
BATCH_RECORDS = 10000


@dataclass
class Batch:
    segments: list  # (File, number of the first record, records)
    position: list  # the next record: index of its file, number in it
    done: float  # bytes of all files up to there
    size: int = 0


@dataclass
class Encoded:
    """The tokens of a batch's documents, each after its separator."""

    tokens: array.array
    lengths: list = field(default_factory=list)  # per segment: tokens of each document with its separator
    undecodable: int = 0


def make_batches(files, text_field, longest, position):
    """Yields the records from `position` on in batches of about BATCH_BYTES, or of one record if that is larger."""
    batch, before = Batch([], position, 0.0), sum(file.limit for file in files[: position[0]])
    for index in range(position[0], len(files)):
        reader = Records(files[index], text_field, longest)
        records, first = [], position[1] if index == position[0] else 0
        batch.segments.append((files[index], first, records))
        for number, record in enumerate(reader):
            if number < first:  # done before the run broke off
                continue
            records.append(record)
            batch.size += len(record or "")
            if batch.size >= BATCH_BYTES or len(records) >= BATCH_RECORDS:
                batch.position, batch.done = [index, number + 1], before + reader.done
                yield batch
                records, first = [], number + 1
                batch = Batch([(files[index], first, records)], batch.position, batch.done)
        before += files[index].limit
    batch.position, batch.done = [len(files), 0], before
    yield batch


def valid_text(text):
    """Replaces halves of surrogate pairs, which JSON may hold, by U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode_chat(tokenizer, file, number, chat):
    try:
        return tokenizer.encode_chat(chat)
    except BadInput as e:
        refuse_record(file, number, str(e))


def encode(tokenizer, text_field, segments):
    tokens = array.array(token_kind(tokenizer))
    encoded = Encoded(tokens)
    for file, first, records in segments:
        lengths = []
        for number, record in enumerate(records, first):
            given = record_text(file, text_field, number, record)
            if file.form == CHATS:
                ids = encode_chat(tokenizer, file, number, given) if given else ()
                tokens.extend(ids)
                lengths += [len(ids)] if given else []
                continue
            text = valid_text(given or "")
            encoded.undecodable += bool(given) and (
                text is not given or file.form == TEXT and "\ufffd" in text and b"\xef\xbf\xbd" not in record)
            text = text.strip()
            if not text:
                continue
            before = len(tokens)
            tokens.append(tokenizer.separator)
            tokens.extend(tokenizer.encode(text))
            lengths.append(len(tokens) - before)
        encoded.lengths.append(lengths)
    return encoded


# ---- a worker's process

worker = {}


def leave_with_parent():
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def start_worker(name, separator, chat, text_field):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    threading.Thread(target=leave_with_parent, daemon=True).start()
    worker.update(tokenizer=open_tokenizer(name, separator, chat), field=text_field)


def encode_in_worker(segments):
    return encode(worker["tokenizer"], worker["field"], segments)


def encode_all(batches, tokenizer, options, processes):
    """Yields (batch, Encoded) in the order of the batches. Few batches, or one of the longest document, are held."""
    if processes == 1:
        for batch in batches:
            yield batch, encode(tokenizer, options.field, batch.segments)
        return
    words = (options.tokenizer, options.separator, options.chat, options.field)
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of pyarrow
    pool = ProcessPoolExecutor(processes, spawn, start_worker, words)
    waiting, held, most = collections.deque(), 0, max(2 * processes * BATCH_BYTES, tokenizer.longest)
    try:
        for batch in batches:
            while waiting and (len(waiting) >= 2 * processes or held + batch.size > most):
                first, result = waiting.popleft()
                held -= first.size
                yield first, result.result()
            waiting.append((batch, pool.submit(encode_in_worker, batch.segments)))
            batch.segments = [(file, number, None) for file, number, _ in batch.segments]
            held += batch.size
        while waiting:
            batch, result = waiting.popleft()
            yield batch, result.result()
    except BrokenProcessPool:
        raise Interrupted("a process that tokenizes was killed (by lack of memory?)") from None
    finally:
        pool.shutdown(cancel_futures=True)
