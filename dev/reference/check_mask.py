#!/usr/bin/env python3
"""Trains small models with a loss mask in transformers, in float32 on the CPU, and by ./train_fp8 on 1 and 2 ranks with
1 and 4 micro-steps. Compares all losses and the final weights.

usage: check_mask.py    in the root of the repository, after `make train_fp8`

transformers gets a label of -100 for each target that is context, and divides the sum of the losses by the number of
the other labels of the whole batch (num_items_in_batch). Ends with status 1 if a loss or a weight tensor has a relative
error above 1e-5, the bound of the goldens.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import tiny_models

STEPS, BATCH, T, CONTEXT = 20, 8, 33, 1 << 31
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
WEIGHT_DECAY = 0.1


def make_shard(path, vocabulary):
    """Writes random tokens with a mask that differs much between sequences. Returns inputs and labels."""
    random = np.random.default_rng(1)
    tokens = random.integers(0, vocabulary, STEPS * BATCH * T + 1).astype(np.uint32)
    share = np.repeat(random.random(STEPS * BATCH) ** 3, T)  # most sequences have few targets that count
    context = np.concatenate([[True], random.random(len(share)) >= share])
    header = np.zeros(256, np.uint32)
    header[:3] = 20240801, 9, len(tokens)
    path.write_bytes(header.tobytes() + (tokens | context * np.uint32(CONTEXT)).astype(np.uint32).tobytes())
    labels = np.where(context, -100, tokens.astype(np.int64))[1:]
    shape = lambda x: torch.from_numpy(x.astype(np.int64)).reshape(STEPS, BATCH, T)
    return shape(tokens[:-1]), shape(labels)


def train_reference(folder, inputs, labels):
    """Returns the losses, and the weights after the last step."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = [dict(params=[p for p in model.parameters() if (p.ndim >= 2) == matrices],
                   weight_decay=WEIGHT_DECAY if matrices else 0.0) for matrices in (True, False)]
    optimizer, losses = torch.optim.AdamW(groups, **ADAMW), []
    for x, y in zip(inputs, labels):
        loss = model(input_ids=x, labels=y, shift_labels=y, num_items_in_batch=int((y != -100).sum())).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train(folder, ranks, micro_steps):
    """Trains by train_fp8. Returns the losses and the weights of its export."""
    out = folder / f"{ranks}-{micro_steps}"
    command = ["./train_fp8", str(folder / "model"), "--train-data", str(folder / "m.bin"), "--precision", "fp32",
               "--shuffle", "off", "--sequence-length", str(T), "--batch-size", str(BATCH // ranks // micro_steps),
               "--grad-accumulation-steps", str(micro_steps), "--num-steps", str(STEPS), "--lr-schedule", "constant",
               "--learning-rate", str(ADAMW["lr"]), "--beta1", str(ADAMW["betas"][0]), "--beta2",
               str(ADAMW["betas"][1]), "--eps", str(ADAMW["eps"]), "--weight-decay", str(WEIGHT_DECAY), "--export-hf",
               str(out / "export"), "--log-dir", str(out), "--init-from", f"file:{out}.meeting"]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "RANK": str(rank),
                                                                           "WORLD_SIZE": str(ranks)})
                 for rank in range(ranks)]
    if any([p.wait() for p in processes]):
        sys.exit(f"{ranks} ranks, {micro_steps} micro-steps: failed")
    losses = [r["loss"] for r in map(json.loads, open(out / "log.jsonl")) if r["type"] == "step"]
    model = AutoModelForCausalLM.from_pretrained(out / "export", dtype=torch.float32)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def compare(folder, name):
    tiny_models.make_model(name).save_pretrained(folder / "model")
    inputs, labels = make_shard(folder / "m.bin", 96)
    losses, weights = train_reference(folder / "model", inputs, labels)
    counts = (labels != -100).sum((1, 2))
    print(f"{name}: {int(counts.min())} to {int(counts.max())} of {BATCH * T} targets count; "
          f"loss {losses[0]:.6f} to {losses[-1]:.6f}")
    passed = True
    for ranks, micro_steps in ((1, 1), (1, 4), (2, 1), (2, 4)):
        own, ended = train(folder, ranks, micro_steps)
        loss = max(abs(a / b - 1) for a, b in zip(own, losses, strict=True))
        weight = max(float((ended[key] - w).norm() / w.norm()) for key, w in weights.items())
        print(f"  {ranks} ranks, {micro_steps} micro-steps: losses within {loss:.1e}, weights within {weight:.1e}")
        passed = passed and loss <= 1e-5 and weight <= 1e-5
    return passed


def main():
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    results = []
    for name in ("llama_tiny", "qwen3_tiny"):
        with tempfile.TemporaryDirectory() as folder:
            results.append(compare(pathlib.Path(folder), name))
    sys.exit(0 if all(results) else 1)


main()
