#!/usr/bin/env python3
"""Trains a transformers model with random weights: the PyTorch and torchao figures that ours are compared with.

bf16 GEMMs, or torchao's float8 in all linear layers but lm_head; SDPA; FSDP2 on several GPUs, with FP8 all-gather for
PRECISION fp8. By default: fused AdamW, torch.compile for each layer, batch 1, no recompute.

  hf_train.py llama3.1-8b fp8 8192
  torchrun --nproc-per-node 4 hf_train.py llama3.1-8b bf16,fp8 2048,8192 --data data/tinystories_llama3_train.bin

Prints for each precision and sequence length a JSON line and a line to read: median step after the first 4, tokens per
second and GPU, model TFLOP/s, the allocator's peak memory, loss of the first step and mean loss of the last 20 (of all,
if fewer), and joules per token after the first 4 steps and 2 s, if NVML reads them and as much time is left. The loss
of a step is that of rank 0's last micro-step.
"""
import argparse
import gc
import json
import os
import time

from energy import EnergyCounter, StepEnergy
from shards import BadShard, read_shard, sequence

DEVICE = "cuda"
WARM_UP_STEPS = 4
PRECISIONS = ("bf16", "fp8", "rowwise", "rowwise_with_gw_hp")
MASTERS = ("bf16", "fp32", "sr", "sr_mv32", "sr_mvplain")
LLAMA, QWEN = ("LlamaConfig", "LlamaForCausalLM"), ("Qwen3Config", "Qwen3ForCausalLM")

# Classes, hidden size, intermediate size, layers, heads, vocabulary, head size, tied embeddings, RoPE theta, eps, and
# the factor of Llama 3's RoPE scaling (None: no scaling).
MODELS = {
    "llama3.2-1b": (LLAMA, 2048, 8192, 16, 32, 128256, 64, True, 5e5, 1e-5, 32.0),
    "llama3.2-3b": (LLAMA, 3072, 8192, 28, 24, 128256, 128, True, 5e5, 1e-5, 32.0),
    "llama3.1-8b": (LLAMA, 4096, 14336, 32, 32, 128256, 128, False, 5e5, 1e-5, 8.0),
    "qwen3-4b": (QWEN, 2560, 9728, 36, 32, 151936, 128, True, 1e6, 1e-6, None),
    "qwen3-14b": (QWEN, 5120, 17408, 40, 40, 151936, 128, False, 1e6, 1e-6, None),
}
KV_HEADS = 8  # all models have as many


def list_of(kind, choices=None):
    """Returns a converter of words with commas between them, for argparse."""
    def convert(text):
        values = [kind(word) for word in text.split(",")]
        if choices and not set(values) <= set(choices) or kind is int and min(values) < 1:
            raise ValueError
        return values
    convert.__name__ = "list"
    return convert


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    p.add_argument("precisions", type=list_of(str, PRECISIONS), metavar="PRECISION[,...]",
                   help="bf16, or torchao's float8: fp8 (tensorwise), rowwise, rowwise_with_gw_hp")
    p.add_argument("lengths", type=list_of(int), metavar="T[,...]", help="tokens per sequence")
    p.add_argument("--bs", type=int, default=1, help="sequences per GPU and micro-step (1)")
    p.add_argument("--accum", type=int, default=1, help="micro-steps per optimizer step (1)")
    p.add_argument("--steps", type=int, default=12, help="optimizer steps (12)")
    p.add_argument("--lr", type=float, default=1e-5, help="learning rate (1e-5)")
    p.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0: off (0)")
    p.add_argument("--masters", choices=MASTERS, default="bf16",
                   help="master weights (bf16). bf16: rounded to nearest; fp32: with autocast, or FSDP2's mixed "
                   "precision; sr, sr_mv32, sr_mvplain: bf16 rounded stochastically, with Adam states in bf16 rounded "
                   "stochastically (sr), in fp32 (sr_mv32) or in bf16 rounded to nearest (sr_mvplain)")
    p.add_argument("--compile", choices=("layer", "none"), default="layer", help="torch.compile each layer, or nothing")
    p.add_argument("--ac", action="store_true", help="activation checkpointing: recompute each layer in backward")
    p.add_argument("--data", metavar="SHARD", help="training shard (data/README.md); without: random token ids")
    p.add_argument("--sequences", action="store_true",
                   help="read --data as train_fp8cu --shuffle off does: the same sequences of T + 1 tokens in each "
                   "epoch; without: windows of T tokens, whose last token has no target")
    p.add_argument("--loss-csv", metavar="FILE", help="append the loss of every step")
    args = p.parse_args()
    if args.steps <= WARM_UP_STEPS or min(args.bs, args.accum) < 1:
        p.error("--steps must be at least %d, --bs and --accum 1" % (WARM_UP_STEPS + 1))
    if args.sequences and not args.data:
        p.error("--sequences needs --data")
    try:
        args.tokens = read_shard(args.data) if args.data else None
    except (BadShard, OSError) as error:
        p.error("--data: %s" % error)
    return args


if __name__ == "__main__":
    ARGS = parse_arguments()  # before the slow imports, so that a wrong command line ends at once

import numpy as np
import torch
import torch.distributed as dist
import transformers


def make_model(name, master):
    classes, hidden, intermediate, layers, heads, vocabulary, head_dim, tied, theta, eps, factor = MODELS[name]
    rope = dict(rope_type="default", rope_theta=theta)
    if factor:  # Llama 3's RoPE scaling, as in the models' own config.json
        rope = dict(rope_type="llama3", rope_theta=theta, factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                    original_max_position_embeddings=8192)
    config = getattr(transformers, classes[0])(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=KV_HEADS, head_dim=head_dim, vocab_size=vocabulary, tie_word_embeddings=tied,
        rms_norm_eps=eps, rope_parameters=rope, max_position_embeddings=131072, use_cache=False,
        attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32 if master == "fp32" else torch.bfloat16)
    with torch.device(DEVICE):
        model = getattr(transformers, classes[1])(config)
    torch.set_default_dtype(torch.float32)
    return model.train()


def convert_to_fp8(model, precision, world):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    if precision == "fp8":
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=world > 1)
    else:
        config = Float8LinearConfig.from_recipe_name(precision)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name)


def shard(model):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def round_stochastically(x):
    """Returns the fp32 tensor x as bf16: up or down at random, right on average."""
    bits = x.view(torch.int32)
    bits = (bits + torch.randint_like(bits, 0, 1 << 16)) & -(1 << 16)
    return bits.view(torch.float32).bfloat16()


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (torch's defaults) whose bf16 weights are rounded stochastically. Unfused, so its speed does not count."""
    KEEP = {"sr": round_stochastically, "sr_mv32": lambda x: x, "sr_mvplain": lambda x: x.bfloat16()}

    def __init__(self, params, lr, kind):
        super().__init__(params, dict(lr=lr))
        self.steps, self.keep = 0, self.KEEP[kind]

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = (self.keep(torch.zeros_like(p, dtype=torch.float32)) for _ in "mv")
                grad = p.grad.float()
                m = state["m"].float().lerp(grad, 0.1)
                v = (state["v"].float() * 0.999).addcmul_(grad, grad, value=0.001)
                w = p.float().mul_(1 - group["lr"] * 0.01)
                divisor = (v / (1 - 0.999**self.steps)).sqrt_().add_(1e-8)
                w.addcdiv_(m / (1 - 0.9**self.steps), divisor, value=-group["lr"])
                p.copy_(round_stochastically(w))
                state["m"], state["v"] = self.keep(m), self.keep(v)


def make_batch(args, T, vocabulary, generator, index):
    """Returns the model's inputs for batch `index`, which counts over steps, micro-steps and ranks."""
    if args.tokens is None:
        ids = torch.randint(0, vocabulary, (args.bs, T), device=DEVICE, generator=generator)
        return dict(input_ids=ids, labels=ids)
    if args.sequences:
        rows = [np.asarray(sequence(args.tokens, T, index * args.bs + row)) for row in range(args.bs)]
        window = torch.from_numpy(np.stack(rows).astype(np.int64)).to(DEVICE)
        ids = window[:, :-1].contiguous()
        return dict(input_ids=ids, labels=ids, shift_labels=window[:, 1:].contiguous())
    size = args.bs * T
    start = index * size % (len(args.tokens) - size)
    ids = np.asarray(args.tokens[start:start + size]).astype(np.int64)
    ids = torch.from_numpy(ids).to(DEVICE).view(args.bs, T)
    return dict(input_ids=ids, labels=ids)


def train_step(args, precision, model, optimizer, batches, world):
    """Returns the loss of the last micro-step, divided by --accum."""
    for batch in batches:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=args.masters == "fp32" and world == 1):
            loss = model(**batch).loss / args.accum
        loss.backward()
    if args.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    if precision == "fp8" and world > 1:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
        precompute_float8_dynamic_scale_for_fsdp(model)
    return loss


def prepare(args, precision, world):
    """Returns the model, converted, compiled and sharded, and its optimizer."""
    model = make_model(args.model, args.masters)
    if precision != "bf16":
        convert_to_fp8(model, precision, world)
    if args.ac:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.compile == "layer":
        for layer in model.model.layers:
            layer.compile()
    if world > 1:
        shard(model)
    if args.masters.startswith("sr"):
        return model, StochasticAdamW(model.parameters(), args.lr, args.masters)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)


def model_flops(model, T):
    """Model FLOPs per token, counted as ours are (docs/METRICS.md): causal attention, no embedding look-up."""
    c = model.config
    matmul = sum(p.numel() for p in model.parameters())
    matmul -= 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size
    return 6 * matmul + 6 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * T


def run(args, precision, T, rank, world):
    """Trains one model and returns its result, with the keys of the `summary` line of our log.jsonl, and the losses."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model, optimizer = prepare(args, precision, world)
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    energy = StepEnergy(EnergyCounter("GPU-%s" % uuid), WARM_UP_STEPS)
    generator = torch.Generator(device=DEVICE).manual_seed(rank)
    times, losses = [], []
    for step in range(args.steps):
        torch.cuda.synchronize()
        energy.begin_step(times)
        begin = time.perf_counter()
        batches = (make_batch(args, T, model.config.vocab_size, generator, (step * args.accum + micro) * world + rank)
                   for micro in range(args.accum))
        loss = train_step(args, precision, model, optimizer, batches, world)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        losses.append(loss.item() * args.accum)
    joules = mean_of_all(energy.joules_per_step(times), world)
    times = sorted(times[WARM_UP_STEPS:])
    seconds, tokens = times[len(times) // 2], args.bs * T * args.accum
    result = dict(type="summary", program=versions(precision), device=device_name(), model=args.model,
                  precision=precision, masters=args.masters, gpus=world, sequence_length=T, batch_size=args.bs,
                  accum=args.accum, recompute=args.ac, steps=args.steps, median_ms=seconds * 1e3,
                  tokens_per_second_per_gpu=tokens / seconds,
                  tflops_per_gpu=model_flops(model, T) * tokens / seconds / 1e12,
                  memory_bytes=torch.cuda.max_memory_allocated(), reserved_bytes=torch.cuda.max_memory_reserved(),
                  first_loss=losses[0], last_loss=sum(losses[-20:]) / len(losses[-20:]))
    if joules is not None:
        result["joules_per_token"] = joules / tokens
    return result, losses


def mean_of_all(own, world):
    """Returns the mean of all ranks' joules per step; None if a rank does not know its own."""
    if world == 1:
        return own
    joules = torch.tensor(float("nan") if own is None else own, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(joules)
    return None if joules.isnan() else joules.item() / world


def versions(precision):
    text = "transformers %s, torch %s" % (transformers.__version__, torch.__version__)
    if precision != "bf16":
        from importlib.metadata import version
        text += ", torchao " + version("torchao")
    return text


def device_name():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def report(args, result, losses):
    print(json.dumps(result))
    print("%(model)s, %(precision)s, %(masters)s masters, T %(sequence_length)d, batch %(batch_size)d x %(accum)d, "
          "%(gpus)d GPU: step %(median_ms).1f ms, %(tokens_per_second_per_gpu).0f tok/s/GPU, %(tflops_per_gpu).0f "
          "TFLOP/s/GPU" % result + ", %.1f GiB, loss %.4f to %.4f" % (
              result["memory_bytes"] / 2**30, result["first_loss"], result["last_loss"])
          + (", %.5f J/token" % result["joules_per_token"] if "joules_per_token" in result else ""), flush=True)
    if args.loss_csv:
        key = "hf,%(model)s,%(precision)s,%(gpus)d,%(sequence_length)d,%(batch_size)d" % result
        with open(args.loss_csv, "a") as file:
            file.writelines("%s,%d,%s\n" % (key, step, loss) for step, loss in enumerate(losses))


def main(args):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(42)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        dist.init_process_group("nccl")
    for precision in args.precisions:
        for T in args.lengths:
            result, losses = run(args, precision, T, rank, world)
            if rank == 0:
                report(args, result, losses)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(ARGS)
