// compare_checkpoints A B LARGEST [STEM]: compares two checkpoints of the same model tensor by tensor. Prints the
// largest relative error of a tensor (norm of the difference over norm of B's tensor). Ends with status 1 if that error
// is above LARGEST or NaN. Without STEM it compares gradients: after ONE step, exp_avg is (1 - beta1) times the
// gradient. STEM "model" compares all weights, "optimizer" the whole optimizer state. Dies if a tensor that it compares
// is not F32, BF16 or F16: COAT's moments and MS-AMP's first moments are in FP8.
#include "../../../llmc/checkpoint/safetensors.h"
#include "check.h"

static Safetensors open_set(const char *folder, const char *stem) {
    Safetensors st;
    Failure failure;
    if (!safetensors_open_folder(&st, folder, stem, &failure)) die("%s", failure.text);
    return st;
}

static float *read_all(const Safetensors *st, const Safetensor *t) {
    Failure failure;
    float *values = (float *)xcalloc((size_t)t->elements, sizeof *values);
    if (!safetensors_read(st, t, 0, t->elements, true, values, &failure)) die("%s", failure.text);
    return values;
}

int main(int argc, char **argv) {
    if (argc != 4 && argc != 5) die("usage: compare_checkpoints A B LARGEST [STEM]");
    const bool gradients = argc == 4;
    const char *stem = gradients ? "optimizer" : argv[4];
    Safetensors a = open_set(argv[1], stem), b = open_set(argv[2], stem);
    if (a.count != b.count)
        die("%s has %lld tensors, %s %lld", argv[1], (long long)a.count, argv[2], (long long)b.count);
    const double largest = atof(argv[3]);
    double worst = -1;
    const char *name = "";
    for (int64_t i = 0; i < b.count; i++) {
        const Safetensor *tb = &b.tensors[i], *ta = safetensors_find(&a, tb->name);
        if (!ta || ta->elements != tb->elements) die("%s: no tensor %s of that size", argv[1], tb->name);
        if (gradients && strncmp(tb->name, "exp_avg.", 8) != 0) continue;
        float *va = read_all(&a, ta), *vb = read_all(&b, tb);
        const double error = check_relative_error(va, vb, tb->elements);
        if (check_is_worse(error, worst)) worst = error, name = tb->name;
        free(va);
        free(vb);
    }
    printf("worst %s off by %.2e (%s)\n", gradients ? "gradient" : "tensor", worst, name);
    safetensors_close(&a);
    safetensors_close(&b);
    return worst >= 0 && worst <= largest ? 0 : 1;
}
