"""Writes safetensors files byte for byte reproducibly: the safetensors package orders metadata at random."""

import json

import numpy as np

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32", "uint32": "U32", "uint8": "U8"}


def _bytes(tensor):
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).tobytes()
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def write_golden(path, tensors, metadata):
    """Writes tensors of torch or numpy in the given order, without gaps. Blanks pad the header to a multiple of 8
    bytes. Fails if the file has 1 MB or more."""
    header, blobs, offset = {"__metadata__": {key: str(value) for key, value in metadata.items()}}, [], 0
    for name, tensor in tensors.items():
        blob = _bytes(tensor)
        header[name] = dict(
            dtype=_NAMES[str(tensor.dtype).removeprefix("torch.")],
            shape=list(tensor.shape),
            data_offsets=[offset, offset + len(blob)],
        )
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    assert path.stat().st_size < 1_000_000, f"{path.name} is too large for a golden"
