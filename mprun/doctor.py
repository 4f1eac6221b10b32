"""`mprun doctor`: what this machine is, and what each precision mode means on it."""

import os
import textwrap
import warnings

from mprun.errors import DONE, BadInput

# Measured; see mprun.precision.emulation.
_WHY_EMULATED = (
    "native CPU kernels add some gradients up in 16 bits and, in FP16, take 10 to 60 times as\n"
    "long (cpu_half=native selects them)"
)


def main(arguments: list[str]) -> int:
    """Print devices, kernels, flags and what happens to each mode here; always exit code 0."""
    if arguments in (["-h"], ["--help"]):
        print(f"usage: mprun doctor\n\n{__doc__}")
        return DONE
    if arguments:
        raise BadInput(f"doctor {arguments[0]}: takes no arguments")

    import torch

    from mprun.precision import pin_math_flags
    from mprun.record.environment import environment, flags

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stock = flags()
    pin_math_flags("ieee")
    for name, text in (*_machine(environment(device)), *_kernels(device)):
        print(f"{name:<14}{text}")
    print("\nmode                 on this machine")
    for mode, verdict, reason in modes(device):
        print(f"{mode:<20} {verdict:<9} {reason}")
    if device.type == "cpu":
        names = textwrap.fill(
            ", ".join(_emulated_operations()), 98, initial_indent="  ", subsequent_indent="  "
        )
        print(f"\nemulated, because {_WHY_EMULATED}:\n{names}")
    print("\nflags that a run pins (here: fp32)")
    for name, value in flags().items():
        before = "" if stock[name] == value else f"   (torch left to itself: {stock[name]})"
        print(f"  {name} = {value}{before}")
    return DONE


def modes(device) -> list[tuple[str, str, str]]:
    """(mode, "honoured" | "emulated" | "refused", how or why) for every mode on `device`."""
    from mprun.precision import MODES, get_policy, why_unsupported

    rows = []
    for name in MODES:
        policy = get_policy(name)
        refusal = why_unsupported(policy, device)
        if refusal is not None:
            rows.append((name, "refused", refusal))
        elif policy.half_dtype is None:
            how = "TF32 products, FP32 sums" if policy.fp32_math == "tf32" else "FP32 products"
            rows.append((name, "honoured", how))
        elif device.type == "cpu":
            rows.append((name, "emulated", _on_a_cpu(policy, device)))
        else:
            rows.append((name, "honoured", _on_a_gpu(policy, device)))
    return rows


def _on_a_cpu(policy, device) -> str:
    from mprun.precision import Arithmetic

    text = f"{Arithmetic(policy, device).kind()} products: FP32 sums, rounded once on store"
    return text + ("; cpu_half=native has no LSTM here" if _no_lstm(policy, device) else "")


def _on_a_gpu(policy, device) -> str:
    import torch

    from mprun.precision import DTYPE_NAMES

    # Tensor Cores came with compute capability 7.0 (NVIDIA Volta).
    cores = torch.cuda.get_device_capability(device) >= (7, 0)
    where = "on Tensor Cores" if cores else "without Tensor Cores (compute capability below 7.0)"
    text = f"native-{DTYPE_NAMES[policy.half_dtype]} products {where}, FP32 sums"
    missing = _no_lstm(policy, device)
    return text + (f"; model=lstm_lm refused: {missing}" if missing else "")


def _no_lstm(policy, device) -> str | None:
    from mprun.precision import why_no_lstm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return why_no_lstm(policy, device)


def _machine(facts: dict) -> list[tuple[str, str]]:
    import torch

    rows = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        rows.append(
            (
                f"GPU {index}",
                f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, "
                f"{gpu.multi_processor_count} multiprocessors, {gpu.total_memory / 2**30:.0f} GiB",
            )
        )
    if not rows:
        built = torch.version.cuda or torch.version.hip
        why = f"torch is built for CUDA {built}" if built else "torch is built without CUDA"
        rows.append(("device", f"no GPU that torch can use ({why})"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores, threads = facts["cpu_count"], facts["threads"]
    rows.append(("CPU", f"{facts['cpu']}, {cores} cores, {threads} threads, {memory:.0f} GiB"))
    versions = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    rows.append(("versions", f"python {facts['python']}, {versions}"))
    commit = f"commit {facts['commit']}" if facts["commit"] else "installed"
    changes = " with local changes" if facts["dirty"] else ""
    rows.append(("mprun", f"{facts['mprun']}, {commit}{changes}"))
    return rows


def _kernels(device) -> list[tuple[str, str]]:
    """What the libraries below torch have for products and updates."""
    import torch

    from mprun.precision.inner_optimizer import has_fused_kernel

    rows = []
    if device.type == "cuda":
        tf32 = "TF32" if torch.cuda.get_device_capability(device) >= (8, 0) else "no TF32"
        bf16 = "BF16" if torch.cuda.is_bf16_supported() else "no BF16"
        rows.append(
            (
                "CUDA",
                f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {tf32}, {bf16}",
            )
        )
    else:
        # Which of these torch can tell depends on its version.
        units = {
            "AVX-512 BF16": "_is_avx512_bf16_supported",
            "AMX BF16": "_is_amx_tile_supported",
            "AMX FP16": "_is_amx_fp16_supported",
        }
        found = [n for n, ask in units.items() if getattr(torch.cpu, ask, lambda: False)()]
        onednn = "oneDNN" if torch.backends.mkldnn.is_available() else "no oneDNN"
        rows.append(
            (
                "CPU kernels",
                f"{torch.backends.cpu.get_cpu_capability()}, {onednn}, 16-bit units: "
                f"{', '.join(found) or 'none'}",
            )
        )
    kinds = ("sgd", "adam", "adamw", "adagrad")
    fused = [kind for kind in kinds if has_fused_kernel(kind, device)]
    rows.append(("fused updates", f"{', '.join(fused) or 'none'} (on {device.type})"))
    return rows


def _emulated_operations() -> list[str]:
    from mprun.precision.emulated_products import routes

    return sorted({name for name, _ in routes().values() if not name.endswith("_")} | {"lstm"})
