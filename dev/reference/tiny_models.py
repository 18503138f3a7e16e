"""The tiny models behind the goldens and the loading tests. Together they have the features that the trainers must get
right: grouped queries, a tied lm_head and one of its own, Llama 3.1's RoPE scaling, biases, QK-norm.

Weights are random, rounded to bfloat16 and kept as float32, so that float32 and bfloat16 runs have the same weights.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

_SMALL = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    vocab_size=128,
    head_dim=64,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    use_cache=False,
)

# name: (config class, model class, sequence length of the golden, seed of the weights, config values)
# AdamW divides a gradient by its own size, so an entry whose first gradient happens to lie near zero turns rounding
# noise into a whole update. The seeds are the best of 0..23: noise of 2e-6 of each gradient tensor's root mean square
# moves no weight tensor by more than 1e-6 in three steps (in the median of those seeds: 1e-6 to 1.2e-5, too near the
# 1e-5 that trainers are held to).
MODELS = {
    # grouped queries, lm_head of its own, an odd sequence length
    "llama_tiny": (
        LlamaConfig,
        LlamaForCausalLM,
        33,
        8,
        dict(
            _SMALL,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
    # Llama 3.1's RoPE scaling: of the 32 frequencies 1 is kept, 3 are interpolated and 28 are divided by `factor`.
    # Over 128 positions this changes the results.
    "llama31_tiny": (
        LlamaConfig,
        LlamaForCausalLM,
        128,
        9,
        dict(
            _SMALL,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
    ),
    # biases on q, k and v. Qwen2 has no head_dim of its own (hidden / heads), so hidden is 128; one layer keeps the
    # golden below 1 MB
    "qwen2_tiny": (
        Qwen2Config,
        Qwen2ForCausalLM,
        48,
        7,
        dict(
            {k: v for k, v in _SMALL.items() if k != "head_dim"},
            hidden_size=128,
            intermediate_size=32,
            num_hidden_layers=1,
            vocab_size=96,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
    # RMSNorm of each query and key head; head_dim is not hidden / heads
    "qwen3_tiny": (
        Qwen3Config,
        Qwen3ForCausalLM,
        48,
        6,
        dict(
            _SMALL,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
}


def _initial_value(name, shape, generator):
    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.2 * noise
    # Large enough that attention is far from uniform and that RoPE, norms, biases and masks show in every gradient;
    # small enough that bfloat16 rounding does not grow from layer to layer (transformers' own bfloat16 run then stays
    # within 2e-2 of the float32 gradients).
    if "q_proj" in name or "k_proj" in name:
        gain = 1.0
    else:
        gain = 0.7 if "embed_tokens" in name or "lm_head" in name else 0.5
    return gain * shape[1] ** -0.5 * noise


def make_model(name, vocab_size=None):
    """Returns the named model in float32 on the CPU, with weights that bfloat16 represents exactly."""
    config_class, model_class, _, seed, values = MODELS[name]
    config = config_class(**dict(values, **({"vocab_size": vocab_size} if vocab_size else {})))
    config._attn_implementation = "eager"
    model = model_class(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():  # a tied lm_head is not listed a second time
            p.copy_(_initial_value(parameter_name, p.shape, generator).bfloat16().float())
    return model
