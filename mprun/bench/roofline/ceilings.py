"""What a GPU can do at best: products per second by number format, bytes per second."""

from dataclasses import dataclass

from mprun.config.rules import nearest
from mprun.errors import BadInput
from mprun.precision import PrecisionPolicy

# Seconds per kernel, an assumption: replayed from a CUDA graph, and started one by one.
GRAPH_LAUNCH_S, EAGER_LAUNCH_S = 1.5e-6, 8e-6
LAUNCH_SOURCE = "assumed: 1.5 us a kernel in a CUDA graph, 8 us eager"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that a program can reach, not those of the data sheet.

    flops: FLOP/s of large products by number format, of "fp16", "bf16", "tf32" and "fp32" those
    that the GPU has; a multiply-add is 2. bandwidth: bytes/s of a copy, read and written together.
    memory: bytes. source: where the rates are from. graph_launch_s, eager_launch_s: seconds that
    one kernel takes at least.
    """

    name: str
    source: str
    flops: dict[str, float]
    bandwidth: float
    memory: float
    graph_launch_s: float = GRAPH_LAUNCH_S
    eager_launch_s: float = EAGER_LAUNCH_S


def _gpu(name: str, half: float, tf32: float | None, fp32: float, bandwidth: float, gib: float):
    flops = {"fp16": half, "fp32": fp32}
    if tf32 is not None:
        # BF16 Tensor Cores came with TF32 and run at the rate of FP16 (NVIDIA A100 data sheet).
        flops |= {"bf16": half, "tf32": tf32}
    source = (
        f"assumed for {name}: FP16 products {half / 1e12:g} TFLOP/s and copies "
        f"{bandwidth / 1e12:g} TB/s as programs reach them; FP32 0.86 of the data sheet"
    )
    return Ceilings(name, source, flops, bandwidth, gib * 2**30)


# FP16 rate and bandwidth of H200: matrix products and copies seen on one (769 to 798 TFLOP/s,
# 4.3 TB/s); of the others: what published training runs were judged by. TF32 is half of FP16 on
# every one of them. FP32 is 0.86 of the data sheet (15.7, 19.5, 67 TFLOP/s), as 57.5 of 67 is on
# an H200, the middle of 55 to 60.
GPUS = {
    "H200": _gpu("H200", 790e12, 395e12, 57.5e12, 4.3e12, 139),
    "H100": _gpu("H100", 740e12, 370e12, 57.5e12, 3.0e12, 79),
    "A100": _gpu("A100", 260e12, 130e12, 16.7e12, 1.75e12, 79),
    "V100": _gpu("V100", 100e12, None, 13.5e12, 0.80e12, 31.5),
}


def ceilings_of(name: str) -> Ceilings:
    """The ceilings of a named GPU, in any case of letters; BadInput for an unknown one."""
    if name.upper() in GPUS:
        return GPUS[name.upper()]
    allowed = f"allowed: {', '.join(GPUS)}"
    if name.lower() in ("cpu", "cuda", "auto"):
        raise BadInput(f"--gpu {name}: a roofline is that of a named GPU ({allowed})")
    raise BadInput(f"--gpu {name}: unknown{nearest(name.upper(), GPUS)} ({allowed})")


def why_not(policy: PrecisionPolicy, overrides: list[str], ceilings: Ceilings) -> str | None:
    """The reason why this GPU has no such mode, or None.

    overrides: dtype names of module overrides. TF32 and BF16 products exist from compute capability
    8.0 on (NVIDIA Ampere), V100 is 7.0.
    """
    needed = {"torch.float16": "fp16", "torch.bfloat16": "bf16", "None": None}[
        str(policy.half_dtype)
    ]
    wanted = [needed, *overrides, "tf32" if policy.fp32_math == "tf32" else None]
    for form in wanted:
        if form is not None and form not in ceilings.flops:
            has = ", ".join(sorted(ceilings.flops))
            return f"{ceilings.name} has no {form.upper()} products (it has {has})"
    return None
