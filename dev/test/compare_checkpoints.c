// compare_checkpoints A B LARGEST: after ONE step, exp_avg is (1 - beta1) times the gradient. Compares it tensor by tensor between two checkpoints of the
// same model, prints the worst relative error (norm of the difference over norm) and ends with status 1 if it is above LARGEST.
#include "../../llmc/safetensors.h"
#include "check.h"

static Safetensors open_optimizer(const char *folder) {
    Safetensors st;
    Failure failure;
    if (!safetensors_open_folder(&st, folder, "optimizer", &failure)) die("%s", failure.text);
    return st;
}

static float *read_all(const Safetensors *st, const Safetensor *t) {
    Failure failure;
    float *values = (float *)xcalloc((size_t)t->elements, sizeof *values);
    if (!safetensors_read(st, t, 0, t->elements, true, values, &failure)) die("%s", failure.text);
    return values;
}

int main(int argc, char **argv) {
    if (argc != 4) die("usage: compare_checkpoints A B LARGEST");
    Safetensors a = open_optimizer(argv[1]), b = open_optimizer(argv[2]);
    const double largest = atof(argv[3]);
    double worst = -1;
    const char *name = "";
    for (int64_t i = 0; i < b.count; i++) {
        const Safetensor *tb = &b.tensors[i], *ta = safetensors_find(&a, tb->name);
        if (!ta || ta->elements != tb->elements) die("%s: no tensor %s of that size", argv[1], tb->name);
        if (strncmp(tb->name, "exp_avg.", 8) != 0) continue;
        float *va = read_all(&a, ta), *vb = read_all(&b, tb);
        const double error = check_relative_error(va, vb, tb->elements);
        if (!(error <= worst)) worst = error, name = tb->name;
        free(va);
        free(vb);
    }
    printf("worst gradient off by %.2e (%s)\n", worst, name);
    safetensors_close(&a);
    safetensors_close(&b);
    return worst >= 0 && worst <= largest ? 0 : 1;
}
