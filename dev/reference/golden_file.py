"""Writes safetensors files byte for byte reproducibly: the safetensors package orders metadata at random."""

import json

import torch

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint8: "U8"}


def write_golden(path, tensors, metadata):
    """Writes tensors in the given order, without gaps. The header is padded with blanks to a multiple of 8 bytes."""
    header, blobs, offset = {"__metadata__": {key: str(value) for key, value in metadata.items()}}, [], 0
    for name, tensor in tensors.items():
        blob = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = dict(
            dtype=_NAMES[tensor.dtype], shape=list(tensor.shape), data_offsets=[offset, offset + len(blob)]
        )
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    assert path.stat().st_size < 1_000_000, f"{path.name} is too large for a golden"
