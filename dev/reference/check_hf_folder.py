#!/usr/bin/env python3
"""Checks a model folder with transformers, or makes a small one.

check_hf_folder.py DIR... [--tokens SHARD.bin --sequence-length T [--num-sequences N]]
                          [--dtype float32|bfloat16] [--device cpu|cuda]
    Loads each folder with AutoModelForCausalLM.from_pretrained. Fails if a weight is missing, unknown or has a wrong
    shape. Prints the number of parameters. With --tokens it also prints the mean loss over the shard's first N windows
    of T inputs (all windows without --num-sequences). Window i holds tokens i*T .. i*T+T, as the trainers' data loader
    reads them with --shuffle off.
check_hf_folder.py --make-model NAME DIR [--vocab-size V] [--max-shard-size 100KB] [--dtype float32|bfloat16]
    Writes one of the models of tiny_models.py (llama_tiny, llama31_tiny, qwen2_tiny, qwen3_tiny) as a folder. A
    --max-shard-size below the model's size splits the weights into several files with an index.
"""

import argparse
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import tiny_models


def read_shard(path):
    """Returns the tokens of a shard: 256 int32 of header (magic, version, count), then uint32 or uint16 tokens."""
    header = np.fromfile(path, np.int32, 256)
    kinds = {(20240801, 7): np.uint32, (20240801, 8): np.uint32, (20240520, 1): np.uint16}
    if len(header) < 256 or (header[0], header[1]) not in kinds:
        sys.exit(f"{path}: not a token shard")
    count = int(header[2:4].view(np.int64)[0]) if header[1] == 8 else int(header[2])
    tokens = np.fromfile(path, kinds[header[0], header[1]], offset=1024)
    if len(tokens) != count:
        sys.exit(f"{path}: {len(tokens)} tokens where the header promises {count}")
    return torch.from_numpy(tokens.astype(np.int64))


def mean_loss(model, tokens, T, num_sequences, device):
    available = (len(tokens) - 1) // T
    count = min(num_sequences or available, available)
    if count < 1:
        sys.exit(f"{len(tokens)} tokens are too few for one sequence of length {T}")
    if tokens.max() >= model.config.vocab_size:
        sys.exit(f"the shard's largest token is {tokens.max()}, the model's vocabulary has {model.config.vocab_size}")
    total = 0.0
    with torch.no_grad():
        for i in range(count):
            window = tokens[i * T : i * T + T + 1].to(device)
            logits = model(input_ids=window[None, :-1]).logits[0].float()
            total += F.cross_entropy(logits, window[1:]).item()
    return total / count, count


def check(folder, a):
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, a.dtype), local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # any error of transformers; the other folders are still checked
        print(f"{folder}: FAILED: {error}")
        return False
    problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if problems:
        print(f"{folder}: FAILED: {problems}")
        return False
    model = model.to(a.device).eval()
    files = sorted(p.name for p in pathlib.Path(folder).glob("*.safetensors"))
    parameters = sum(p.numel() for p in model.parameters())
    line = f"{folder}: {type(model).__name__}, {len(files)} weight file(s), {parameters} parameters"
    if a.tokens:
        loss, count = mean_loss(model, read_shard(a.tokens), a.sequence_length, a.num_sequences, a.device)
        line += f", loss {loss:.6f} over {count} sequences of {a.sequence_length}"
    print(line)
    return True


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folders", nargs="+", metavar="DIR")
    p.add_argument("--tokens")
    p.add_argument("--sequence-length", type=int)
    p.add_argument("--num-sequences", type=int)
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    p.add_argument("--device", default="cpu")
    p.add_argument("--make-model", metavar="NAME", choices=tiny_models.MODELS)
    p.add_argument("--vocab-size", type=int)
    p.add_argument("--max-shard-size", default="5GB")
    a = p.parse_args()
    if bool(a.tokens) != bool(a.sequence_length):
        p.error("--tokens and --sequence-length go together")
    if a.make_model and (len(a.folders) != 1 or a.tokens):
        p.error("--make-model takes one DIR and no --tokens")
    return a


if __name__ == "__main__":
    a = parse_arguments()
    logging.disable_progress_bar()
    if a.make_model:
        model = tiny_models.make_model(a.make_model, a.vocab_size).to(getattr(torch, a.dtype))
        model.save_pretrained(a.folders[0], max_shard_size=a.max_shard_size)
        sys.exit(0)
    results = [check(folder, a) for folder in a.folders]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(0 if all(results) else 1)
