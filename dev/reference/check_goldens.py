#!/usr/bin/env python3
"""Checks the goldens of make_goldens.py without transformers.

The model is written out below in torch's float64 operations. Autograd gives its gradients, which finite differences of
the loss check. The printed numbers say how far the goldens, made in float32, are from it.
"""

import json
import math
import pathlib
import sys

import numpy as np
import torch
from safetensors import safe_open

FOLDER = pathlib.Path(__file__).resolve().parent / "goldens"
# A tenth of the errors that the CPU trainer may have (loss and logits 1e-5, gradients 1e-4, weights 1e-5), so that a
# golden's own error cannot fail a test.
LIMITS = dict(loss=1e-6, logits=1e-6, grad=1e-5, after=1e-6, grad_norm=1e-6)
# Central differences with step 1e-5 in float64 are off by about 1e-9, from rounding and truncation. Gradients are 1e-4
# and more.
DIFFERENCE_STEP, DIFFERENCE_LIMIT = 1e-5, 1e-5


def inverse_frequencies(config, head_dim):
    rope = config["rope_parameters"]
    frequency = np.array([rope["rope_theta"] ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    if rope["rope_type"] == "default":
        return frequency
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    # 0: long waves, whose frequency is divided by `factor`; 1: short waves, whose frequency is kept
    blend = np.clip((original * frequency / (2 * math.pi) - low) / (high - low), 0, 1)
    return blend * frequency + (1 - blend) * frequency / rope["factor"]


def rms_norm(x, weight, eps):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, angles):  # x [B, heads, T, HD], angles [T, HD/2]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def forward(config, p, tokens):
    """Returns logits [B, T, V] and the mean loss of tokens [B, T+1]; p maps Hugging Face names to float64 tensors."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    B, T = inputs.shape
    NH, NKV, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    HD = config.get("head_dim") or config["hidden_size"] // NH
    angles = torch.arange(T).double()[:, None] * torch.from_numpy(inverse_frequencies(config, HD))
    future = torch.ones(T, T).triu(1).bool()
    x = p["model.embed_tokens.weight"][inputs]
    for layer in range(config["num_hidden_layers"]):

        def w(name):
            return p.get(f"model.layers.{layer}.{name}")

        def project(h, name, heads):
            y = h @ w(f"self_attn.{name}_proj.weight").T
            if w(f"self_attn.{name}_proj.bias") is not None:
                y = y + w(f"self_attn.{name}_proj.bias")
            y = y.view(B, T, heads, HD).transpose(1, 2)
            return (
                rms_norm(y, w(f"self_attn.{name}_norm.weight"), eps)
                if w(f"self_attn.{name}_norm.weight") is not None
                else y
            )

        h = rms_norm(x, w("input_layernorm.weight"), eps)
        q, k, v = project(h, "q", NH), project(h, "k", NKV), project(h, "v", NKV)
        q, k, v = (
            rotate(q, angles),
            rotate(k, angles).repeat_interleave(NH // NKV, 1),
            v.repeat_interleave(NH // NKV, 1),
        )
        scores = (q @ k.transpose(2, 3) / math.sqrt(HD)).masked_fill(future, -math.inf)
        attention = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, NH * HD)
        x = x + attention @ w("self_attn.o_proj.weight").T
        h = rms_norm(x, w("post_attention_layernorm.weight"), eps)
        gate, up = h @ w("mlp.gate_proj.weight").T, h @ w("mlp.up_proj.weight").T
        x = x + (gate * torch.sigmoid(gate) * up) @ w("mlp.down_proj.weight").T
    logits = rms_norm(x, p["model.norm.weight"], eps) @ p.get("lm_head.weight", p["model.embed_tokens.weight"]).T
    loss = (logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]).mean()
    return logits, loss


def gradients(config, values, tokens):
    p = {key: value.clone().requires_grad_() for key, value in values.items()}
    logits, loss = forward(config, p, tokens)
    loss.backward()
    return logits.detach(), loss.item(), {key: value.grad for key, value in p.items()}


def adamw_step(values, grads, moments, step, m):
    for key, g in grads.items():
        first, second = moments.setdefault(key, (torch.zeros_like(g), torch.zeros_like(g)))
        first = m["beta1"] * first + (1 - m["beta1"]) * g
        second = m["beta2"] * second + (1 - m["beta2"]) * g * g
        moments[key] = first, second
        update = first / (1 - m["beta1"] ** step) / (torch.sqrt(second / (1 - m["beta2"] ** step)) + m["eps"])
        decay = m["weight_decay"] if g.ndim >= 2 else 0.0
        values[key] = values[key] * (1 - m["learning_rate"] * decay) - m["learning_rate"] * update


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def finite_difference_error(config, values, grads, tokens, generator, per_tensor=2):
    """Returns the largest error of autograd against central differences, relative to the tensor's largest gradient.

    It tests `per_tensor` entries of each tensor: the one with the largest gradient, and random ones.
    """
    worst = 0.0
    for key, g in grads.items():
        entries = [g.abs().argmax().item()] + torch.randint(g.numel(), (per_tensor - 1,), generator=generator).tolist()
        for i in entries:
            losses = []
            for sign in (1, -1):
                moved = dict(values, **{key: values[key].clone()})
                moved[key].view(-1)[i] += sign * DIFFERENCE_STEP
                losses.append(forward(config, moved, tokens)[1].item())
            slope = (losses[0] - losses[1]) / (2 * DIFFERENCE_STEP)
            worst = max(worst, abs(slope - g.view(-1)[i].item()) / g.abs().max().item())
    return worst


def check(path):
    config = json.loads(path.with_name(path.stem + ".config.json").read_text())
    with safe_open(path, "pt") as file:
        metadata = {
            key: float(value)
            for key, value in file.metadata().items()
            if key in ("beta1", "beta2", "eps", "weight_decay", "learning_rate", "steps")
        }
        golden = {key: file.get_tensor(key) for key in file.keys()}
    tokens = golden["tokens"].long()
    values = {key[6:]: value.double() for key, value in golden.items() if key.startswith("param.")}
    assert all(
        torch.equal(v, v.float().bfloat16().double()) for v in values.values()
    ), "a weight is not exact in bfloat16"
    logits, loss, grads = gradients(config, values, tokens)
    found = {
        "logits": relative(golden["logits"], logits),
        "loss": abs(golden["loss"].item() / loss - 1),
        "grad": max(relative(golden[f"grad.{key}"], g) for key, g in grads.items()),
        "grad_norm": abs(
            golden["grad_norm"].item() / torch.stack([g.norm() for g in grads.values()]).norm().item() - 1
        ),
    }
    slope_error = finite_difference_error(config, values, grads, tokens, torch.Generator().manual_seed(2))
    moments, steps = {}, int(metadata["steps"])
    for step in range(1, steps + 1):
        _, loss, step_grads = gradients(config, values, tokens)
        found["loss"] = max(found["loss"], abs(golden[f"loss_step{step}"].item() / loss - 1))
        adamw_step(values, step_grads, moments, step, metadata)
    found["after"] = max(relative(golden[f"after{steps}.{key}"], value) for key, value in values.items())
    smallest = min((g.norm().item() / math.sqrt(g.numel()), key) for key, g in grads.items())
    print(
        f"{path.stem}: "
        + ", ".join(f"{key} {value:.1e}" for key, value in found.items())
        + f"; finite differences {slope_error:.1e}"
        + f"; least gradient {smallest[0]:.1e} (root mean square of {smallest[1]})"
    )
    return all(found[key] < limit for key, limit in LIMITS.items()) and slope_error < DIFFERENCE_LIMIT


if __name__ == "__main__":
    paths = [p for p in sorted(FOLDER.glob("*.safetensors")) if p.with_name(p.stem + ".config.json").exists()]
    results = [check(path) for path in paths]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(0 if paths and all(results) else 1)
