#!/usr/bin/env python3
"""Trains a Hugging Face folder with transformers, and compares its losses with those of a trainer's log.

  train_folder.py make FOLDER VOCABULARY                 writes a small random Llama with untied embeddings
  train_folder.py compare FOLDER SHARD LOG.JSONL EXPORT  trains FOLDER on the sequences of --shuffle off, one a step

The run must have --batch-size 1, --shuffle off, --lr-schedule constant, fp32 masters and fp32 moments. Ends with
status 1 if a loss differs by more than 2e-3 or EXPORT has other rows than FOLDER's vocabulary.
"""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "peers"))

import torch
from shards import read_shard, sequence
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def make(folder, vocabulary):
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(vocab_size=int(vocabulary), hidden_size=256, intermediate_size=768,
                                 num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                                 tie_word_embeddings=False)).save_pretrained(folder)


def compare(folder, shard, log, export):
    records = [json.loads(line) for line in open(log)]
    settings = next(r for r in records if r["type"] == "settings")["settings"]
    steps = [r for r in records if r["type"] == "step"]
    T, lr, decay = settings["sequence-length"], settings["learning-rate"], settings["weight-decay"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    plain = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    adam = torch.optim.AdamW([{"params": matrices, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}],
                             lr=lr, betas=(settings["beta1"], settings["beta2"]), eps=settings["eps"])
    tokens, worst = read_shard(shard), 0.0
    for i, step in enumerate(steps):
        ids = torch.tensor(list(sequence(tokens, T, i)), device=device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=ids[None, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits.float(), ids[1:])
        adam.zero_grad()
        loss.backward()
        adam.step()
        worst = max(worst, abs(loss.item() - step["loss"]))
        print("step %d: transformers %.6f, trainer %.6f" % (i + 1, loss.item(), step["loss"]))
    rows = AutoModelForCausalLM.from_pretrained(export).get_output_embeddings().weight.shape[0]
    print("%d steps, largest difference %.2e; the export loads and has %d rows" % (len(steps), worst, rows))
    return worst <= 2e-3 and rows == model.config.vocab_size


if sys.argv[1] == "make":
    make(*sys.argv[2:])
else:
    sys.exit(0 if compare(*sys.argv[2:]) else 1)
