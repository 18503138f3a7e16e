// Tests FLOP counts against calculations by hand, MFU and SOL, and the table of peaks.
#include "../../llmc/config/flops.h"
#include "lib/check.h"

// Returns the FLOPs per token of a preset with sequences of T tokens. `recipe` is a number for recipe_row();
// RECIPE_BF16 means --precision bf16.
static TokenFlops preset_flops(const char *name, int64_t T, int recipe, const char *filter, bool emulate) {
    ModelConfig m;
    CHECK(model_config_preset(&m, name), "there is a preset %s", name);
    if (!m.vocab_size) m.vocab_size = 320;
    Options o = options_default();
    o.precision = recipe == RECIPE_BF16 ? PRECISION_BF16 : PRECISION_FP8;
    if (recipe != RECIPE_BF16) o.fp8_recipe = recipe;
    o.fp8_emulate = emulate;
    options_resolve(&o);
    ParameterTable t = parameter_table(&m);
    Precision p = precision_plan(&o, filter, &m, &t, true);
    const TokenFlops f = flops_per_token(&t, &m, T, &p);
    precision_free(&p);
    parameter_table_free(&t);
    return f;
}

// Checks the FP8 FLOPs per token of llama3.1-8b. The other FLOPs are bf16.
static void check_fp8(double expected, int recipe, const char *filter, bool emulate) {
    const TokenFlops f = preset_flops("llama3.1-8b", 8192, recipe, filter, emulate),
                     bf16 = preset_flops("llama3.1-8b", 8192, RECIPE_BF16, "", false);
    CHECK(f.fp8 == expected && flops_total(f) == bf16.bf16 && bf16.fp8 == 0,
          "%s, filter \"%s\": %.0f of %.0f FLOPs are FP8; expected %.0f", recipe_row(recipe)->name, filter, f.fp8,
          flops_total(f), expected);
}

static void check_peak(int major, int minor, const char *name, double tflops) {
    const double peak = flops_peak_bf16(major, minor, name);
    CHECK(peak == tflops * 1e12, "%d.%d %s has a peak of %g FLOP/s; expected %g", major, minor, name, peak,
          tflops * 1e12);
}

int main(void) {
    // The linear layers of each of llama3.1-8b's 32 layers have (4096 x 6144) + (4096 x 4096) + 3 (4096 x 14336) =
    // 218,103,808 weights. lm_head has 128256 x 4096.
    const double layers = 32 * 218103808.0, head = 128256 * 4096.0;
    TokenFlops f = preset_flops("llama3.1-8b", 8192, RECIPE_BF16, "", false);
    CHECK(f.bf16 == 6 * (layers + head) + 6.0 * 32 * 4096 * 8192 && f.fp8 == 0,
          "llama3.1-8b in bf16 has the FLOPs computed by hand, all in bf16: found %.0f in bf16 and %.0f in FP8", f.bf16,
          f.fp8);
    f = preset_flops("llama3.1-8b", 8192, RECIPE_TENSORWISE, "", false);
    CHECK(f.fp8 == 6 * layers && f.bf16 == 6 * head + 6.0 * 32 * 4096 * 8192,
          "llama3.1-8b in FP8 has only lm_head and attention in bf16: found %.0f in bf16 and %.0f in FP8", f.bf16,
          f.fp8);
    // 12,802 tokens/s at 51.47 GFLOP per token, on a GPU with a peak of 989.5 TFLOP/s
    CHECK(fabs(flops_mfu(f, 12802, 989.5e12) - 0.66591) < 1e-4, "MFU counts FP8 FLOPs like bf16 ones; found %g",
          flops_mfu(f, 12802, 989.5e12));
    CHECK(fabs(flops_sol(f, 12802, 989.5e12) - 0.39496) < 1e-4, "SOL counts FP8 FLOPs half; found %g",
          flops_sol(f, 12802, 989.5e12));
    CHECK(isnan(flops_mfu(f, 12802, 0)) && isnan(flops_sol(f, 12802, 0)),
          "a GPU of unknown peak has neither MFU nor SOL");
    // Filters of linear layers, recipes with bf16 GEMMs, and emulation reduce the FP8 FLOPs; lm_head is bf16 here.
    check_fp8(6 * layers, RECIPE_DELAYED, "", false);
    check_fp8(6 * layers, RECIPE_ROWWISE, "lm_head", false);
    check_fp8(6 * layers, RECIPE_BLOCKWISE, "", false);
    check_fp8(4 * layers, RECIPE_ROWWISE_GW_HP, "", false);  // wgrad is in bf16
    check_fp8(6 * layers / 32 * 30, RECIPE_TENSORWISE, "first,last", false);
    check_fp8(6 * 32 * 3 * 4096.0 * 14336, RECIPE_TENSORWISE, "attention", false);
    check_fp8(4 * layers / 32 * 31 - 4 * 31 * 4096.0 * 14336, RECIPE_ROWWISE_GW_HP, "last,down", false);
    check_fp8(0, RECIPE_MXFP8, "attention,mlp", false);
    check_fp8(0, RECIPE_MXFP8, "", true);
    f = preset_flops("tiny", 64, RECIPE_BLOCKWISE, "", false);
    CHECK(f.fp8 == 0 && f.bf16 > 0,
          "hidden size 64 is no multiple of blockwise's 128, so nothing is FP8; found %.0f FP8 FLOPs", f.fp8);
    // Tied embeddings count once, as lm_head. Attention counts heads x head_dim, which may differ from the hidden size
    // (qwen3-0.6b: 16 x 128 = 2048, hidden size 1024).
    f = preset_flops("qwen3-0.6b", 4096, RECIPE_BF16, "", false);
    CHECK(f.bf16 ==
              6 * (28 * (1024.0 * 4096 + 2048 * 1024 + 3 * 1024 * 3072) + 151936 * 1024.0) + 6.0 * 28 * 2048 * 4096,
          "qwen3-0.6b has the FLOPs computed by hand; found %.0f", f.bf16);
    // Biases and norms are not GEMMs.
    f = preset_flops("qwen2.5-0.5b", 1, RECIPE_BF16, "", false);
    CHECK(f.bf16 == 6 * (24 * (896.0 * 1152 + 896 * 896 + 3 * 896 * 4864) + 151936 * 896.0) + 6.0 * 24 * 896,
          "qwen2.5-0.5b has the FLOPs computed by hand; found %.0f", f.bf16);

    check_peak(9, 0, "NVIDIA H200", 989.5);
    check_peak(9, 0, "NVIDIA H200 NVL", 835.5);
    check_peak(9, 0, "NVIDIA H100 80GB HBM3", 989.5);
    check_peak(9, 0, "NVIDIA H100 PCIe", 756);
    check_peak(9, 0, "NVIDIA H100 NVL", 835.5);
    check_peak(9, 0, "NVIDIA GH200 480GB", 989.5);
    check_peak(9, 0, "NVIDIA H20", 148);
    check_peak(10, 0, "NVIDIA B200", 2250);
    check_peak(10, 0, "NVIDIA GB200", 2500);
    check_peak(8, 0, "NVIDIA A100-SXM4-80GB", 312);
    check_peak(8, 9, "NVIDIA L40S", 362);
    check_peak(8, 9, "NVIDIA L4", 121);
    check_peak(8, 9, "NVIDIA GeForce RTX 4090", 165.2);
    check_peak(8, 9, "NVIDIA H100", 0);   // name of one GPU, compute capability of another
    check_peak(9, 0, "NVIDIA H2000", 0);  // H200 is only part of this word
    check_peak(12, 0, "Some new GPU", 0);
    return check_report();
}
