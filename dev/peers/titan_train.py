#!/usr/bin/env python3
"""Trains Llama 3.1 8B with torchtitan's own Trainer on all GPUs: FSDP2, torch.compile, fused AdamW, torchao's float8.

  torchrun --nproc-per-node 2 titan_train.py fp8 8192 --data data/tinystories_llama3_train.bin [-- torchtitan's options]

Two parts of torchtitan are replaced: the data loader, which reads a training shard in file order, and the metrics
logger, which keeps what torchtitan's metrics processor measures. Tokenizer and validator are left out, so nothing is
downloaded. PRECISION fp8 is tensorwise with FP8 all-gather and precomputed scales, as torchtitan's docs/float8.md
recommends.

Prints a JSON line and a line to read: tokens per second and GPU (median of the intervals of 5 steps after the first 5),
the allocator's peak memory and the loss of the last interval.
"""
import argparse
import dataclasses
import json
import os
import statistics
import sys

from shards import BadShard, read_shard, sequence

INTERVAL = 5  # steps between two figures
PRECISIONS = ("bf16", "fp8", "rowwise", "rowwise_with_gw_hp")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
MODELS = {"llama3.1-8b": "8B", "debug": "debugmodel"}


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("precision", choices=PRECISIONS, metavar="PRECISION", help=", ".join(PRECISIONS))
    p.add_argument("length", type=int, metavar="T", help="tokens per sequence; one sequence per GPU and step")
    p.add_argument("--data", required=True, metavar="SHARD", help="training shard (data/README.md)")
    p.add_argument("--model", choices=MODELS, default="llama3.1-8b", help="llama3.1-8b, or torchtitan's debug model")
    p.add_argument("--masters", choices=DTYPES, default="fp32",
                   help="fp32: parameters and Adam states in fp32, torchtitan's default; bf16: all in bf16 (fp32)")
    p.add_argument("--steps", type=int, default=20, help="optimizer steps, a multiple of %d (20)" % INTERVAL)
    p.add_argument("--ac", choices=("none", "selective", "full"), default="none", help="recompute in backward (none)")
    p.add_argument("--out", default="log/titan", help="folder for what torchtitan writes (log/titan)")
    p.add_argument("options", nargs="*", metavar="OPTION", help="options of torchtitan, after --")
    args = p.parse_args()
    if args.steps < 2 * INTERVAL or args.steps % INTERVAL:
        p.error("--steps must be a multiple of %d, at least %d" % (INTERVAL, 2 * INTERVAL))
    if args.length < 1:
        p.error("T must be positive")
    try:
        args.tokens = read_shard(args.data)
        sequence(args.tokens, args.length, 0)
    except (BadShard, OSError) as error:
        p.error("--data: %s" % error)
    return args


def titan_options(args):
    """Returns the command line for torchtitan: its llama3_8b.toml as options, with compile on."""
    options = {
        "job.dump_folder": args.out, "job.description": "train_fp8cu-peer",
        "metrics.log_freq": INTERVAL, "metrics.disable_color_printing": None,
        "model.name": "llama3_shards", "model.flavor": MODELS[args.model],
        "optimizer.name": "AdamW", "optimizer.lr": 1e-5, "optimizer.implementation": "fused",
        "lr_scheduler.warmup_steps": 2,
        "training.local_batch_size": 1, "training.seq_len": args.length, "training.max_norm": 1.0,
        "training.steps": args.steps, "training.dtype": DTYPES[args.masters],
        "parallelism.data_parallel_shard_degree": -1, "compile.enable": None, "activation_checkpoint.mode": args.ac,
    }
    if args.precision != "bf16":
        options["model.converters"] = "quantize.linear.float8"
        options["quantize.linear.float8.filter_fqns"] = "output"
    if args.precision == "fp8":
        options["quantize.linear.float8.enable_fsdp_float8_all_gather"] = None
        options["quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"] = None
    elif args.precision != "bf16":
        options["quantize.linear.float8.recipe_name"] = args.precision
    words = []
    for name, value in options.items():
        words += ["--" + name] if value is None else ["--" + name, str(value)]
    return words + args.options


def summarize(args, records, world, program, device):
    """Returns the result, with the keys of the `summary` line of our log.jsonl.

    `records` holds (step, metrics) of torchtitan's metrics processor, one for each interval.
    """
    later = [metrics for step, metrics in records if step > INTERVAL]
    speed = statistics.median(metrics["throughput(tps)"] for metrics in later)
    active = max(metrics["memory/max_active(GiB)"] for _, metrics in records)
    reserved = max(metrics["memory/max_reserved(GiB)"] for _, metrics in records)
    return dict(type="summary", program=program, device=device, model=args.model, precision=args.precision,
                masters=args.masters, gpus=world, sequence_length=args.length, batch_size=1, recompute=args.ac,
                steps=args.steps, median_ms=1e3 * args.length / speed, tokens_per_second_per_gpu=speed,
                memory_bytes=int(active * 2**30), reserved_bytes=int(reserved * 2**30),
                first_loss=records[0][1]["loss_metrics/global_avg_loss"],
                last_loss=records[-1][1]["loss_metrics/global_avg_loss"])


def make_parts(args, records):
    """Returns the two functions that replace torchtitan's: they make the data loader and the metrics processor."""
    import numpy as np
    import torch
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.metrics import BaseLogger, build_metrics_processor

    class Sequences(torch.utils.data.IterableDataset):
        """The sequences of one rank, in file order, epoch after epoch."""
        def __init__(self, rank, ranks):
            self.rank, self.ranks = rank, ranks

        def __iter__(self):
            index = self.rank
            while True:
                window = torch.from_numpy(np.asarray(sequence(args.tokens, args.length, index)).astype(np.int64))
                yield {"input": window[:-1]}, window[1:]
                index += self.ranks

    class Recorder(BaseLogger):
        def log(self, metrics, step):
            records.append((step, {name: float(value) for name, value in metrics.items()}))

    def build_dataloader(dp_world_size, dp_rank, tokenizer, job_config):
        return ParallelAwareDataloader(Sequences(dp_rank, dp_world_size), dp_rank=dp_rank, dp_world_size=dp_world_size,
                                       batch_size=job_config.training.local_batch_size)

    def build_metrics(*positional, **named):
        processor = build_metrics_processor(*positional, **named)
        processor.logger = Recorder()
        return processor

    return build_dataloader, build_metrics


def main():
    args = parse_arguments()
    sys.argv[1:] = titan_options(args)  # torchtitan reads sys.argv when it is imported
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as torchtitan's run_train.sh does
    import torch
    from importlib.metadata import version
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer, main as train

    records = []
    build_dataloader, build_metrics = make_parts(args, records)
    register_train_spec("llama3_shards", dataclasses.replace(
        get_train_spec(), build_tokenizer_fn=None, build_validator_fn=None, build_dataloader_fn=build_dataloader,
        build_metrics_processor_fn=build_metrics))
    train(Trainer)
    if int(os.environ.get("RANK", 0)) == 0:
        program = "torchtitan %s, torch %s" % (version("torchtitan"), torch.__version__)
        if args.precision != "bf16":
            program += ", torchao " + version("torchao")
        result = summarize(args, records, int(os.environ["WORLD_SIZE"]), program, torch.cuda.get_device_name())
        print(json.dumps(result))
        print("torchtitan %(model)s, %(precision)s, %(masters)s masters, T %(sequence_length)d, %(gpus)d GPUs: "
              "%(tokens_per_second_per_gpu).0f tok/s/GPU" % result
              + ", %.1f GiB, loss %.4f" % (result["memory_bytes"] / 2**30, result["last_loss"]), flush=True)


if __name__ == "__main__":
    main()
