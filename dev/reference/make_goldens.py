#!/usr/bin/env python3
"""Makes the goldens of every model of tiny_models.py, with transformers in float32 on the CPU.

It writes goldens/NAME.safetensors, goldens/NAME.config.json (as transformers 5 writes it) and
goldens/NAME.config.v4.json (the same model as transformers 4 wrote it, and as most published folders have it).

Each golden holds, as float32 unless said otherwise:
    tokens [B, T+1] int32     inputs are tokens[:, :T], targets tokens[:, 1:]; loss is the mean cross-entropy over B*T
    logits [B, T, V], loss [1]
    param.NAME, grad.NAME     weights (exact in bfloat16) and gradients of the first step, by Hugging Face's names; a
                              tied lm_head is absent
    after3.NAME               weights after three torch.optim.AdamW steps on one batch, weight decay on matrices only
    loss_step1..3 [1]         loss before each of the three updates (loss_step1 = loss)
    grad_norm [1]             L2 norm over all gradients of the first step
The optimizer's settings are in the file's metadata.
"""

import json
import pathlib

import torch
import torch.nn.functional as F

import tiny_models
from golden_file import write_golden

OUT = pathlib.Path(__file__).resolve().parent / "goldens"
BATCH = 2
STEPS = 3
ADAMW = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
WEIGHT_DECAY = 0.01


def make_tokens(vocab_size, T):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (BATCH, T + 1), generator=generator)


def forward(model, tokens):
    logits = model(input_ids=tokens[:, :-1]).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def old_style_config(config):
    """Returns the config.json as transformers 4 wrote it: other keys for RoPE and the data type."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    old["torch_dtype"] = old.pop("dtype")
    return old


def write_configs(name, model):
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    config = json.loads(model.config.to_json_string())  # as save_pretrained writes it
    for suffix, values in (("config.json", config), ("config.v4.json", old_style_config(config))):
        (OUT / f"{name}.{suffix}").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def make_golden(name):
    model = tiny_models.make_model(name)
    tokens = make_tokens(model.config.vocab_size, tiny_models.MODELS[name][2])
    golden = {"tokens": tokens.int()}
    parameters = dict(model.named_parameters())
    for key, p in parameters.items():
        assert torch.equal(p, p.bfloat16().float()), key
        golden[f"param.{key}"] = p.detach().clone()
    optimizer = torch.optim.AdamW(
        [
            dict(params=[p for p in parameters.values() if p.ndim >= 2], weight_decay=WEIGHT_DECAY),
            dict(params=[p for p in parameters.values() if p.ndim < 2], weight_decay=0.0),
        ],
        foreach=False,
        fused=False,
        **ADAMW,
    )
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        logits, loss = forward(model, tokens)
        loss.backward()
        golden[f"loss_step{step}"] = loss.detach().reshape(1)
        if step == 1:
            golden["loss"], golden["logits"] = loss.detach().reshape(1).clone(), logits.detach().clone()
            golden |= {f"grad.{key}": p.grad.clone() for key, p in parameters.items()}
            golden["grad_norm"] = (
                torch.stack([p.grad.double().norm() for p in parameters.values()]).norm().float().reshape(1)
            )
        optimizer.step()
    golden |= {f"after{STEPS}.{key}": p.detach().clone() for key, p in parameters.items()}
    metadata = dict(
        model=name,
        batch=BATCH,
        sequence_length=tokens.shape[1] - 1,
        optimizer="AdamW",
        steps=STEPS,
        learning_rate=ADAMW["lr"],
        beta1=ADAMW["betas"][0],
        beta2=ADAMW["betas"][1],
        eps=ADAMW["eps"],
        weight_decay=WEIGHT_DECAY,
        decayed="ndim >= 2",
    )
    path = OUT / f"{name}.safetensors"
    write_golden(path, golden, metadata)
    write_configs(name, model)
    print(
        f"{path.name}: {path.stat().st_size:,} bytes, loss {loss_line(golden)}, "
        f"gradient norm {golden['grad_norm'].item():.6f}"
    )


def loss_line(golden):
    return " -> ".join(f"{golden[f'loss_step{step}'].item():.6f}" for step in range(1, STEPS + 1))


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # sums in one order
    for name in tiny_models.MODELS:
        make_golden(name)
