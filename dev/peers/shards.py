"""Reads a training shard (llmc/data/dataloader.h): 256 x int32 header, then uint32 or uint16 token ids."""
import mmap
import struct

HEADER_BYTES = 1024
TOKEN_CODES = {(20240801, 7): "I", (20240801, 8): "I", (20240520, 1): "H"}  # header[0], header[1]: uint32 or uint16


class BadShard(Exception):
    """A file is not a shard, is incomplete or is too short. The message says why."""


def read_shard(path):
    """Returns the token ids of the shard at `path` as a read-only memoryview, mapped and not copied."""
    with open(path, "rb") as file:
        head = file.read(16)
        if len(head) < 16 or struct.unpack("<2i", head[:8]) not in TOKEN_CODES:
            raise BadShard("%s: no training shard (data/README.md says how to make one)" % path)
        magic, version, count, high = struct.unpack("<2i2I", head)
        count += high << 32 if version == 8 else 0
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    code = TOKEN_CODES[magic, version]
    if len(view) != HEADER_BYTES + count * struct.calcsize(code):
        raise BadShard("%s: %d bytes do not hold the %d tokens of its header" % (path, len(view), count))
    return view[HEADER_BYTES:].cast(code)


def sequence(tokens, T, index):
    """Returns sequence `index` of the epochs over `tokens`: T inputs and one more target, in file order."""
    count = (len(tokens) - 1) // T
    if count == 0:
        raise BadShard("%d tokens hold no sequence of %d and a target" % (len(tokens), T))
    start = index % count * T
    return tokens[start:start + T + 1]
