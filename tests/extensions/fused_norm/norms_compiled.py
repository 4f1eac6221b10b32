"""The kernels of BatchNorm with ReLU, compiled ahead of time for a GPU that need not be there."""

import itertools
import re

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mprun.extensions.fused_norm import kernels, modules

DTYPES = ("fp16", "bf16", "fp32")
TARGETS = (80, 90)
_TILE = {"LANES": 32, "BLOCK": 64}
_LEVELS = {"LEVELS": 5}
_FINISH = {"LANES": 256, "BLOCK": 8, "LEVELS": 8}
FLAGS = (True, False)
# Kernel -> the constants of each of its forms.
FORMS = {
    "statistics_kernel": [_TILE | _LEVELS],
    "finish_statistics_kernel": [_FINISH],
    "normalise_kernel": [
        _TILE | {"RELU": relu, "SUM": adds} for relu, adds in itertools.product(FLAGS, FLAGS)
    ],
    "gradient_sums_kernel": [_TILE | _LEVELS | {"MASK": m} for m in ("no", "input", "output")],
    "finish_sums_kernel": [_FINISH],
    "gradient_kernel": [_TILE | {"MASK": m} for m in ("no", "input")],
}
_FP32 = {"parts", "statistics", "totals"}
_OF_CHANNELS = {"weight", "bias", "of_bias", "of_weight", "running_mean", "running_var"}
_NUMBERS = {"momentum", "rest", "eps"}
_COUNTS = {"rows", "channels", "steps", "chunks", "chunk"}


def compiled(name, constants, dtype, norm_dtype, capability):
    """The PTX of one form of a kernel."""
    kernel = getattr(kernels, name)
    signature, aligned = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in _NUMBERS:
            signature[argument] = "fp32"
        elif argument in _COUNTS:
            signature[argument] = "i32"
        elif argument == "batches":
            signature[argument] = "*i64"
        else:
            of = "fp32" if argument in _FP32 else norm_dtype if argument in _OF_CHANNELS else dtype
            signature[argument] = f"*{of}"
        if signature[argument].startswith("*") or argument == "channels":
            aligned[(place,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    options = dict(modules.LAUNCH)
    return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options).asm[
        "ptx"
    ]


def faults(ptx, name, dtype):
    """What of a kernel's instructions would round otherwise, or load number by number."""
    found = []
    if re.search(r"\bfma\.\w+(\.ftz)?\.f32", ptx):
        found.append("contracts products and sums")
    if re.search(r"\.ftz|\.approx|div\.full|rsqrt", ptx):
        found.append("approximates or flushes")
    if "atom" in ptx or re.search(r"\bred\.", ptx):
        found.append("adds atomically")
    if dtype != "fp32" and name in ("normalise_kernel", "gradient_kernel"):
        if f"cvt.rn.{dtype.replace('fp', 'f')}" not in ptx:
            found.append("does not round to the nearest")
    if "finish" not in name and not re.search(r"ld\.global[.\w:]*\.v4", ptx):
        found.append("loads less than 16 bytes at a time")
    return found


def outcomes(capability):
    """Each form in each pair of dtypes -> its faults."""
    found = {}
    for name, forms in FORMS.items():
        for constants in forms:
            for dtype, norm_dtype in (*((d, "fp32") for d in DTYPES), ("fp16", "fp16")):
                label = f"{name} {constants.get('MASK', '')} {dtype} {norm_dtype} "
                label += " ".join(key for key in ("RELU", "SUM") if constants.get(key))
                ptx = compiled(name, constants, dtype, norm_dtype, capability)
                found[" ".join(label.split())] = faults(ptx, name, dtype)
    return found
