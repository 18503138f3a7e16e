#!/usr/bin/env python3
"""Tests that the code of a layer is equal in train_fp8.c and train_fp8.cu, except for comments and whitespace.

usage: test_twins.py [DIRECTORY]    DIRECTORY holds train_fp8.c, train_fp8.cu and llmc/ (default: this repository)

Also tests that functions which this code calls have equal types in both trainers (DIFFERENT), and that layer_forward,
layer_recompute and layer_backward are short. Ends with "N passed, N failed" and status 1 if anything failed. Without a
DIRECTORY it also tests itself: it plants changes in a copy of the CPU trainer, which stands for the GPU trainer, and
must find them.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "lib"))
from counted import check, finish  # noqa: E402

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

# Structs and functions that must be equal in both trainers.
TWIN_STRUCTS = ["Layer", "LayerActs", "OutputGradients"]
TWIN_FUNCTIONS = ["layer_attention", "layer_forward", "layer_recompute", "layer_backward"]
LINES = {"layer_forward": 20, "layer_recompute": 20, "layer_backward": 40}  # most lines that these may have

# Functions that the twins call. In both trainers the types of result and arguments must be equal, const aside, and the
# bodies must differ.
KERNELS = "the CPU computes with llmc/reference/, the GPU launches kernels"
DIFFERENT = {
    "layer_weights": "the CPU finds views of a layer's weights, the GPU asks fsdp",
    "layer_gradients": "the CPU finds views of its gradient buffer, the GPU asks fsdp",
    "layer_output_gradients": "on the GPU these tensors also point to FP8 versions, scales and amaxes",
    "keep_gate_up": "the CPU rounds in place, the GPU stores FP8 codes",
    "restore_gate_up": "the CPU has nothing to do",
    "qtensor_ready": "the GPU casts a tensor once it is complete, on the CPU each GEMM casts its operands",
    "linear": "the CPU casts operands and multiplies, the GPU runs a cuBLASLt plan",
    "linear_dgrad": "the CPU casts operands and multiplies, the GPU runs a cuBLASLt plan",
    "linear_wgrad": "the CPU casts operands and multiplies, the GPU runs a cuBLASLt plan",
    "rmsnorm": KERNELS,
    "add_rmsnorm": KERNELS,
    "rmsnorm_backward": KERNELS,
    "qknorm_rope": KERNELS,
    "qknorm_rope_backward": KERNELS,
    "bias_backward": KERNELS,
    "attention": KERNELS,
    "attention_backward": KERNELS,
    "swiglu": KERNELS,
    "swiglu_backward": KERNELS,
}
DIFFERENT_STRUCTS = {
    "QTensor": "the CPU keeps values alone, the GPU also FP8 versions, scales and amaxes",
    "Activations": "each trainer has buffers that the other does not need",
}

def words(text):
    """Returns the tokens of C code, without comments, includes and whitespace."""
    text = re.sub(r"^ *# *include .*", "", text, flags=re.M)
    text = re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', lambda m: m.group(1) or " ", text, flags=re.S)
    return re.findall(r'"(?:\\.|[^"\\])*"|\w+|[^\w\s]', text)


def closing(tokens, start):
    """Returns the index of the bracket that closes the one at start."""
    depth = 0
    for i in range(start, len(tokens)):
        depth += (tokens[i] in "({[") - (tokens[i] in ")}]")
        if depth == 0:
            return i
    return len(tokens) - 1


def find_struct(tokens, name):
    for i in range(len(tokens) - 2):
        if tokens[i:i + 3] == ["typedef", "struct", "{"]:
            end = closing(tokens, i + 2)
            if tokens[end + 1:end + 3] == [name, ";"]:
                return tokens[i:end + 3]
    return None


def find_function(tokens, name):
    """Returns positions of the function's definition, whose first argument must be a Trainer; None if there is none.

    These are its start, the bracket of the arguments, the brace of the body, and the position behind its end.
    """
    for i in range(1, len(tokens) - 1):
        if tokens[i] != name or tokens[i + 1] != "(" or "Trainer" not in tokens[i + 2:i + 4]:
            continue
        body = closing(tokens, i + 1) + 1
        if body < len(tokens) and tokens[body] == "{":
            start = i
            while start > 0 and tokens[start - 1] not in (";", "}"):
                start -= 1
            return start, i + 1, body, closing(tokens, body) + 1
    return None


def types(tokens, function):
    """Returns the types of a function's result and arguments: its head without names of arguments, static, inline and
    const.
    """
    start, bracket, body, _ = function
    result, current = [" ".join(w for w in tokens[start:bracket] if w not in ("static", "inline", "const"))], []
    for word in tokens[bracket + 1:body - 1] + [","]:
        if word == ",":
            result.append(" ".join(current[:-1]))
            current = []
        elif word != "const":
            current.append(word)
    return result


def first_difference(a, b):
    for i, (x, y) in enumerate(zip(a + ["(end)"], b + ["(end)"])):
        if x != y:
            return f'after "{" ".join(a[max(0, i - 8):i])}": "{x}" in train_fp8.c, "{y}" in train_fp8.cu'
    return ""


def cpu_sources(root):
    """Returns train_fp8.c and the headers that have its types and some of its functions."""
    files = [root / "train_fp8.c", root / "llmc/cpu/trainer.h", root / "llmc/cpu/shard.h"]
    return "\n".join(f.read_text() for f in files if f.exists())


def gpu_sources(root):
    """Returns train_fp8.cu and the headers of llmc/ that may have its types."""
    files = [root / "train_fp8.cu", root / "llmc/fp8/qtensor.cuh", root / "llmc/memory/activations.cuh"]
    return "\n".join(f.read_text() for f in files if f.exists())


def lines_of(text, name):
    found = re.search(rf"^static [^\n]*\b{name}\(Trainer[^;]*?\{{\n.*?^\}}", text, re.S | re.M)
    return found.group(0).count("\n") + 1 if found else 0


def compare(root):
    c_text, cu_text = cpu_sources(root), gpu_sources(root)
    c, cu = words(c_text), words(cu_text)
    for name in TWIN_STRUCTS + TWIN_FUNCTIONS:
        if name in TWIN_STRUCTS:
            a, b = find_struct(c, name), find_struct(cu, name)
        else:
            at, bt = find_function(c, name), find_function(cu, name)
            a, b = at and c[at[0]:at[3]], bt and cu[bt[0]:bt[3]]
        missing = [where for where, found in (("train_fp8.c", a), ("the GPU trainer", b)) if not found]
        check(not missing and a == b,
              f"{name}: " + (f"not in {' and '.join(missing)}" if missing else first_difference(a, b)))
    for name, most in LINES.items():
        check(0 < lines_of(c_text, name) <= most, f"train_fp8.c has {name}, with at most {most} lines")
    for name, reason in DIFFERENT.items():
        at, bt = find_function(c, name), find_function(cu, name)
        if not at or not bt:
            check(False, f"{name} is in both trainers")
            continue
        a, b = types(c, at), types(cu, bt)
        check(a == b, f"{name}: types in train_fp8.c and in the GPU trainer are equal: {a} and {b}")
        check(c[at[2]:at[3]] != cu[bt[2]:bt[3]],
              f"{name} differs between the trainers: {reason}; if it is equal now, move it to TWIN_FUNCTIONS")
    for name, reason in DIFFERENT_STRUCTS.items():
        a, b = find_struct(c, name), find_struct(cu, name)
        check(a and b, f"{name} is in both trainers")
        check(a != b, f"{name} differs between the trainers: {reason}; if it is equal now, move it to TWIN_STRUCTS")


def fake_gpu(text):
    """Returns a correct GPU trainer: the CPU trainer, with other bodies and structs where they must differ."""
    for name in DIFFERENT:
        text = re.sub(rf"(\b{name}\((?:const )?Trainer[^;{{]*?\) \{{)", r"\1 gpu();", text, count=1)
    for name in DIFFERENT_STRUCTS:
        text = re.sub(rf"\n\}} {name};", f"\n    int gpu;\n}} {name};", text, count=1)
    return text


def result_of(directory, text):
    """Returns status and output of this test on a directory whose GPU trainer is `text`."""
    (directory / "train_fp8.cu").write_text(text)
    run = subprocess.run([sys.executable, __file__, str(directory)], capture_output=True, text=True)
    return run.returncode, run.stdout


def changed(text, name, word, other):
    """Returns text with the first `word` in the twin `name` replaced by `other`."""
    function = name in TWIN_FUNCTIONS
    found = re.search(rf"^static [^\n]*\b{name}\(.*?^\}}" if function else rf"typedef struct \{{[^}}]*\}} {name};",
                      text, re.S | re.M)
    body = found.group(0).replace(word, other, 1)
    assert body != found.group(0), (name, word)
    return text[:found.start()] + body + text[found.end():]


def test_itself():
    plants = [("Layer", "Real *qkv_bias", "float *qkv_bias"), ("LayerActs", "QTensor h", "Real *h"),
              ("OutputGradients", "qkv, out", "out, qkv"),
              ("layer_forward", "w.norm2", "w.norm1"), ("layer_recompute", "again.mlp", "again.norms"),
              ("layer_forward", "&w.down", "&w.out"), ("layer_forward", "    swiglu(t, &a->h, a->gate_up);\n", ""),
              ("layer_backward", "dw.k_norm", "dw.q_norm"), ("layer_backward", "l - 1", "l")]
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        cpu = cpu_sources(REPOSITORY)
        (directory / "train_fp8.c").write_text(cpu)
        right = fake_gpu(cpu)
        status, output = result_of(directory, right)
        check(status == 0, "a correct GPU trainer passes:\n" + output)
        spaced = changed(right, "layer_forward", "{\n", "{\n\n    // another comment\n")
        status, output = result_of(directory, spaced)
        check(status == 0, "another comment and an empty line are no difference:\n" + output)
        for name, word, other in plants:
            status, output = result_of(directory, changed(right, name, word, other))
            check(status == 1 and f"FAILED: {name}:" in output, f"{name}: {other!r} in place of {word!r} is found")
        renamed = right.replace("layer_backward(Trainer", "layer_backwards(Trainer")
        check(result_of(directory, renamed)[0] == 1, "a missing layer_backward is found")
        swapped = re.sub(r"(\bswiglu\(Trainer \*t, )QTensor \*", r"\1Real *", right, count=1)
        check(result_of(directory, swapped)[0] == 1, "another type of an argument of swiglu is found")
        check(result_of(directory, cpu)[0] == 1,
              "functions that should differ and are equal are found")


def main():
    if len(sys.argv) > 1:
        compare(pathlib.Path(sys.argv[1]))
    else:
        compare(REPOSITORY)
        test_itself()
    finish()


if __name__ == "__main__":
    main()
