#!/usr/bin/env python3
"""Trains on ONE process with accelerate and torchao's FP8, with and without FP8 all-gather (docs/CLAIMS.md).

  accelerate_gather.py bf16|fp8|gather|gather-late --data SHARD --log-dir FOLDER

fp8          tensorwise FP8 in every linear layer but the first and lm_head, as accelerate chooses them
gather       fp8 with enable_fsdp_float8_all_gather=True, as accelerate's FSDP2 example sets it
gather-late  gather with the optimizer made after the layers were converted, so that it holds their new weights

Writes the loss of each step to FOLDER/log.jsonl, which dev/plot_loss.py draws. Prints how many of the model's parameter
tensors the optimizer holds, and what share of the values of the converted layers changed in training (bf16: of one
layer's up_proj). Without a GPU, torchao multiplies in bf16 (emulate=True). Needs accelerate, torchao and transformers
(requirements.txt).
"""
import argparse
import json
import pathlib

from shards import BadShard, read_shard, sequence

MODES = ("bf16", "fp8", "gather", "gather-late")
VOCABULARIES = {"small": 320, "llama3.2-1b": 128256, "llama3.2-3b": 128256, "llama3.1-8b": 128256}


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("mode", choices=MODES)
    p.add_argument("--data", required=True, metavar="SHARD", help="training shard (data/README.md)")
    p.add_argument("--log-dir", required=True, type=pathlib.Path, metavar="FOLDER")
    p.add_argument("--model", default="llama3.2-1b", choices=VOCABULARIES, metavar="MODEL",
                   help=", ".join(VOCABULARIES) + " (llama3.2-1b); small: 4 layers, for generated stories")
    p.add_argument("--masters", choices=("bf16", "fp32"), default="bf16", help="dtype of the weights (bf16)")
    p.add_argument("--sequence-length", type=int, default=2048)
    p.add_argument("--steps", type=int, default=150, help="steps of one sequence each (150)")
    p.add_argument("--lr", type=float, default=1e-5)
    args = p.parse_args()
    if min(args.steps, args.sequence_length) < 1:
        p.error("--steps and --sequence-length must be at least 1")
    try:
        args.tokens, args.bs, args.sequences = read_shard(args.data), 1, True
        sequence(args.tokens, args.sequence_length, 0)
    except (BadShard, OSError) as error:
        p.error("--data: %s" % error)
    if max(args.tokens) >= VOCABULARIES[args.model]:
        p.error("--data: token %d is not in the vocabulary of %s, which has %d" % (
            max(args.tokens), args.model, VOCABULARIES[args.model]))
    return args


if __name__ == "__main__":
    ARGS = parse_arguments()  # before the slow imports, so that a wrong command line ends at once

import hf_train
import torch
from accelerate import Accelerator

# The fields of hf_train.MODELS, in its order.
hf_train.MODELS["small"] = (hf_train.LLAMA, 256, 768, 4, 8, VOCABULARIES["small"], 32, True, 1e4, 1e-5, None)


def make_accelerator(mode):
    on_cpu = not torch.cuda.is_available()
    if mode == "bf16":
        return Accelerator(cpu=on_cpu, mixed_precision="bf16")
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=mode.startswith("gather"), emulate=on_cpu)
    return Accelerator(cpu=on_cpu, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=config)])


def values(layer):
    """Returns the layer's weight without torchao's wrapper."""
    return getattr(layer.weight, "_tensor", layer.weight).detach()


def main(args):
    accelerator = make_accelerator(args.mode)
    hf_train.DEVICE = accelerator.device.type
    torch.manual_seed(42)
    model = hf_train.make_model(args.model, args.masters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    bare = accelerator.unwrap_model(model)
    if args.mode == "gather-late":
        optimizer = accelerator.prepare(torch.optim.AdamW(bare.parameters(), lr=args.lr))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = sum(id(p) in held for p in bare.parameters())
    layers = [m for m in bare.modules() if type(m).__name__ == "Float8Linear"] or [bare.model.layers[1].mlp.up_proj]
    before = [values(layer).clone() for layer in layers]
    args.log_dir.mkdir(parents=True, exist_ok=True)
    losses = []
    with open(args.log_dir / "log.jsonl", "w") as log:
        for step in range(args.steps):
            loss = model(**hf_train.make_batch(args, args.sequence_length, 0, None, step)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            print(json.dumps({"type": "step", "step": step + 1, "loss": losses[-1]}), file=log, flush=True)
    changed = sum((values(layer) != old).sum().item() for layer, old in zip(layers, before))
    last = losses[-20:]
    print("%s: the optimizer holds %d of %d parameter tensors; %.2f%% of the values of %d linear layers changed; loss "
          "%.4f in step 1, mean of the last %d of %d steps %.4f" % (
              args.mode, found, len(list(bare.parameters())), 100 * changed / sum(old.numel() for old in before),
              len(layers), losses[0], len(last), args.steps, sum(last) / len(last)))


if __name__ == "__main__":
    main(ARGS)
