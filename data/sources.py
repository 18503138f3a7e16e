"""The texts of data/prepare.py: finds files, judges each by its name and its first bytes, and reads its records.

A record is a piece of a text file, a line of JSON, or a string of a Parquet column. record_text() makes a document of
it.
"""

import glob
import gzip
import io
import json
import os
import re
import zlib
from dataclasses import dataclass

from problems import BadInput, import_package
from vocabulary import MARK

READ_BYTES = 1 << 20
HEAD_BYTES = 1 << 16  # a file is judged by its first bytes
ROW_GROUP_BYTES = 4 << 30  # a larger row group is refused
SMALL_GROUP_BYTES = 256 << 20
MANY_ROWS, FEW_ROWS = 1024, 8  # read at once of small and of larger row groups: any row may be a long document

TEXT, LINES, PARQUET = f"UTF-8 text with {MARK.decode()} lines between documents", "JSON lines", "Parquet data"
CHATS = "JSON lines with chats"  # with --chat
FORMS = {".txt": TEXT, ".jsonl": LINES, ".parquet": PARQUET}
PACKED = {".gz": "gzip", ".zst": "zstd"}
PACKED_BEGIN = ((b"\x1f\x8b", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst"))
UTF16 = "UTF-16 or UTF-32 text", "convert it: iconv -f UTF-16 -t UTF-8"
FOREIGN = (  # how a file begins that cannot be read, what it is, and what to do
    (rb"ARROW1", "Arrow data", "write its documents as Parquet or JSON lines"),
    (rb'\s*\[\s*[{"]', "a JSON array", "write one object in each line: jq -c '.[]'"),
    (rb"%PDF", "a PDF file", "write its documents into a text file"),
    (rb"(?i)\s*<(!doctype|html|\?xml)", "a web page or XML", "write its documents into a text file"),
    (rb"BZh", "compressed by bzip2", "unpack it: bunzip2"),
    (rb"\xfd7zXZ", "compressed by xz", "unpack it: unxz"),
    (rb"\x04\x22\x4d\x18", "compressed by lz4", "unpack it: lz4 -d"),
    (rb"PK[\x03\x05]|7z\xbc\xaf|Rar!", "an archive", "unpack it"),
    (rb"version https://git-lfs", "a pointer of Git LFS", "get the file itself: git lfs pull"),
    (rb"\xff\xfe|\xfe\xff", *UTF16),
    (rb"(?s).*\0", "binary data, or UTF-16 text without a mark", "convert it"),
)


@dataclass
class File:
    path: str
    form: str
    packed: str  # ".gz", ".zst" or ""
    size: int  # the whole file has so many bytes
    limit: int  # text beyond these bytes is not read
    head: int  # checksum of the first bytes
    split: str  # "train", "val", or "" if each so many documents are validation
    argument: int  # index of the argument that named it


# ---- which files


def name_parts(path):
    """Returns the form that the name promises, or None, and the ending of its compression, or ""."""
    base, ending = os.path.splitext(path.lower())
    packed = ending if ending in PACKED else ""
    return FORMS.get(os.path.splitext(base)[1] if packed else ending), packed


def folder_files(folder):
    """All files of a folder and of those within it whose names promise a form, sorted, and the number of the others."""
    paths = []

    def fail(error):
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders.sort()
        paths += [os.path.join(parent, name) for name in names]
    known = sorted(path for path in paths if name_parts(path)[0])
    return known, len(paths) - len(known)


def expand(argument):
    """Returns the files that a path or a glob names, in an order that is always the same, and the number left out."""
    found = [argument] if os.path.exists(argument) else sorted(glob.glob(argument, recursive=True))
    if not found:
        raise BadInput(f"{argument}: no such file, folder or match of a glob")
    files, left_out = [], 0
    for path in found:
        if os.path.isdir(path):
            inside, others = folder_files(path)
            files, left_out = files + inside, left_out + others
        else:
            files.append(path)
    if not files:
        raise BadInput(f"{argument}: holds no file named {', '.join(FORMS)} (or .gz or .zst after these)")
    return files, left_out


# ---- what a file is


def open_stream(file, raw):
    """The file's bytes, unpacked."""
    if file.packed == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), READ_BYTES)
    if file.packed == ".zst":
        arrow = import_package("pyarrow", file.path)
        return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw), "zstd"), READ_BYTES)
    return raw


def refuse_name(path, promised, found, remedy):
    raise BadInput(f"{path}: its name says {promised}, but it is {found}; {remedy}")


def read_head(path, file):
    """Returns the unpacked first bytes. Refuses a name that says another compression than the first bytes do."""
    with open(path, "rb") as raw:
        head = raw.read(HEAD_BYTES)
        if not head:
            raise BadInput(f"{path}: is empty, 0 bytes; leave it out")
        file.head = zlib.crc32(head)
        file.packed = next((ending for begin, ending in PACKED_BEGIN if head.startswith(begin)), "")
        form, packed = name_parts(path)
        if packed and packed != file.packed:
            found = f"compressed by {PACKED[file.packed]}" if file.packed else "not compressed"
            refuse_name(path, PACKED[packed], found, f"give its name the ending {file.packed or 'of its content'}")
        if form and file.packed and not packed:
            remedy = f"name it {os.path.basename(path)}{file.packed}, or unpack it"
            refuse_name(path, form, f"compressed by {PACKED[file.packed]}", remedy)
        if not file.packed:
            return head
        raw.seek(0)
        with guarded(path):
            head = open_stream(file, raw).read(HEAD_BYTES)
    if not head:
        raise BadInput(f"{path}: is empty, 0 bytes when unpacked; leave it out")
    return head


def begins_lines(head, promised):
    """True if the bytes begin with a line of JSON. If the name promises no such lines, a whole object stands in the
    line: text in C may begin with a brace and a string."""
    if promised or b"\n" not in head.lstrip():
        return re.match(rb"\s*\{" if promised else rb'\s*\{\s*"', head)
    try:
        return isinstance(json.loads(head.lstrip().split(b"\n")[0]), dict)
    except (ValueError, RecursionError):
        return False


def judge(path, argument, split, field, limit=None, size=None, chat=False):
    """Returns the File. Ends the program if it cannot be read as its name and its first bytes say."""
    if not os.path.isfile(path) and os.path.exists(path):
        raise BadInput(f"{path}: is a pipe or a device, which cannot be read twice; write its data to a file")
    size = size or os.path.getsize(path)
    file = File(path, "", "", size, limit or size, 0, split, argument)
    head = read_head(path, file).removeprefix(b"\xef\xbb\xbf")
    promised = name_parts(path)[0]
    if head.startswith(b"PAR1"):
        file.form = PARQUET
    else:
        refuse_foreign(path, promised or TEXT, head)
        file.form = LINES if begins_lines(head, promised == LINES) else TEXT
    if promised and file.form != promised:
        ending = next(ending for ending, form in FORMS.items() if form == file.form)
        refuse_name(path, promised, file.form if promised == TEXT else "not; it begins like " + file.form,
                    f"give it the ending {ending}, or correct what it holds")
    if chat and file.form != LINES:
        raise BadInput(f"{path}: is {file.form}; --chat reads JSON lines")
    file.form = CHATS if chat else file.form
    if file.form == PARQUET:
        check_parquet(file, field)
    elif file.form != TEXT and (b"\n" in head or len(head) < HEAD_BYTES):
        record_text(file, field, 0, head.split(b"\n")[0])
    return file


def refuse_foreign(path, promised, head):
    """Ends the program if the bytes are no UTF-8 text, before they become tokens."""
    found = [rest for begin, *rest in FOREIGN if re.match(begin, head)]
    if not found and head.decode("utf-8", errors="replace").count("\ufffd") > max(1, len(head) // 10):
        found = [("not UTF-8", "convert it: iconv -f ENCODING -t UTF-8")]
    if found:
        raise BadInput(f"{path}: this is {found[0][0]}, not {promised}; {found[0][1]}")


def check_parquet(file, field):
    if file.packed:
        raise BadInput(f"{file.path}: is Parquet data compressed as a whole; unpack it: gunzip, or zstd -d")
    with guarded(file.path):
        parquet = open_parquet(file)
        schema, groups = parquet.schema_arrow, range(parquet.metadata.num_row_groups)
    columns = ", ".join(f"{c.name} ({c.type})" for c in schema)
    if field not in schema.names:
        raise BadInput(
            f"{file.path}: has no column \"{field}\"; name the column of the text with --field; it has: {columns}"
        )
    kind = schema.field(field).type
    kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
    if str(kind) not in ("string", "large_string", "string_view"):
        raise BadInput(
            f"{file.path}: the column \"{field}\" is of type {kind}, not text; name a column of strings with --field; "
            f"it has: {columns}"
        )
    for i in groups:
        size = column_bytes(parquet, field, i)
        if size > ROW_GROUP_BYTES:
            raise BadInput(
                f"{file.path}: row group {i + 1} has {size / 1e9:.1f} GB of {field}, above "
                f"{ROW_GROUP_BYTES >> 30} GiB; write smaller ones: pyarrow.parquet.write_table(..., row_group_size=999)"
            )


def open_parquet(file):
    parquet = import_package("pyarrow", file.path) and import_package("pyarrow.parquet", file.path)
    return parquet.ParquetFile(file.path, buffer_size=READ_BYTES, pre_buffer=False)


def column_bytes(parquet, field, group):
    columns = parquet.metadata.row_group(group)
    sizes = [columns.column(i) for i in range(columns.num_columns)]
    return sum(c.total_uncompressed_size for c in sizes if c.path_in_schema == field)


# ---- records


class guarded:
    """Names the file in whatever a library says of broken data in it."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        from_library = isinstance(error, OSError) and error.errno is None  # errors of the system have a number
        is_data = from_library or isinstance(error, (EOFError, zlib.error, ValueError))
        if is_data:
            raise BadInput(f"{self.path}: its data is broken or cut off: {error}; get or make it again") from None


class Records:
    """Iterates over the records of a file. `done` is how far it is, in bytes of the file."""

    def __init__(self, file, field, longest):
        self.file, self.field, self.longest, self.done = file, field, longest, 0

    def __iter__(self):
        with guarded(self.file.path):
            if self.file.form == PARQUET:
                yield from self.strings()
                return
            with open(self.file.path, "rb") as raw:
                stream = open_stream(self.file, raw)
                if stream.peek(3).startswith(b"\xef\xbb\xbf"):  # a byte order mark is no text
                    stream.read(3)
                for record in self.pieces(stream) if self.file.form == TEXT else self.lines(stream):
                    self.done = min(raw.tell(), self.file.limit)
                    yield record

    def refuse_long(self, what):
        raise BadInput(f"{self.file.path}: {what} is longer than {self.longest >> 20} MiB, the most for a document")

    def pieces(self, stream):
        rest, number, plain = b"", 0, not self.file.packed
        while True:
            left = self.file.limit - stream.tell() if plain else READ_BYTES
            data = stream.read(min(READ_BYTES, max(left, 0)))
            if not data:
                break
            *whole, rest = (rest + data).split(MARK)
            number += len(whole)
            yield from whole
            if len(rest) > self.longest:
                self.refuse_long(f"document {number + 1}: the text up to the next {MARK.decode()}")
        if plain and stream.tell() < self.file.limit:
            raise BadInput(f"{self.file.path}: became shorter while it was read")
        if self.file.limit == self.file.size:  # a document that the limit cuts is left out
            yield rest

    def lines(self, stream):
        number = 0
        while line := stream.readline(self.longest + 1):
            number += 1
            if len(line) > self.longest:
                self.refuse_long(f"line {number}")
            yield line

    def strings(self):
        parquet, number = open_parquet(self.file), 0
        sizes = [column_bytes(parquet, self.field, i) for i in range(parquet.metadata.num_row_groups)]
        for i, size in enumerate(sizes):
            rows = MANY_ROWS if size <= SMALL_GROUP_BYTES else FEW_ROWS
            for batch in parquet.iter_batches(rows, [i], [self.field], use_threads=False):
                share = batch.num_rows / max(parquet.metadata.row_group(i).num_rows, 1)
                self.done += self.file.size * share * size / max(sum(sizes), 1)
                for value in batch.column(0):
                    number += 1
                    text = value.as_py()
                    if text is not None and len(text) > self.longest:
                        self.refuse_long(f"row {number}")
                    yield text


def refuse_record(file, number, problem):
    raise BadInput(f"{file.path}: {'row' if file.form == PARQUET else 'line'} {number + 1} {problem}")


def record_text(file, field, number, record):
    """Returns the text of record `number`, from 0, or the arguments of its chat template. None: a blank line."""
    if file.form == TEXT:
        return record.decode("utf-8", errors="replace")
    if file.form == PARQUET:
        if record is None:
            refuse_record(file, number, f"has no text: {field} is null; leave such rows out")
        return record
    try:
        text = record.decode("utf-8").removeprefix("\ufeff")
        if not text.strip():
            return None
        values = json.loads(text)
    except (ValueError, RecursionError) as e:
        begin = record[:60].decode("utf-8", errors="replace").strip()
        why = f"{e.msg}, column {e.colno}" if isinstance(e, json.JSONDecodeError) else e
        refuse_record(file, number, f"is no JSON: {why}; it begins: {begin} (correct it, or leave it out)")
    if not isinstance(values, dict):
        refuse_record(file, number, "is no JSON object; each line must be one, such as {\"text\": \"Once.\"}")
    if field not in values:
        names = ", ".join(map(str, list(values)[:20])) or "none"
        remedy = f"name the field of the {'messages' if file.form == CHATS else 'text'} with --field"
        refuse_record(file, number, f"has no field \"{field}\"; {remedy}; it has: {names}")
    if file.form == CHATS:
        return {"messages": values[field], "tools": values.get("tools")}
    if not isinstance(values[field], str):
        refuse_record(file, number, f"has a field \"{field}\" that is no string but {json.dumps(values[field])[:60]}; "
                      "name the field of the text with --field")
    return values[field]
