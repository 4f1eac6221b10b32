"""What this machine is and what runs on it, as plain values: the facts behind `mprun doctor`."""

import os
import warnings
from collections.abc import Callable
from functools import partial

import torch

from mprun.bench.energy import PowerMeter, meter_of
from mprun.build import policy_from
from mprun.config.compose import compose_config
from mprun.config.option_files import modes as mode_files
from mprun.errors import BadInput
from mprun.precision import (
    DTYPE_NAMES,
    ForwardContext,
    PrecisionPolicy,
    get_policy,
    pin_math_flags,
    why_no_lstm,
    why_unsupported,
)
from mprun.precision.torch_update import has_fused_kernel
from mprun.training.environment import environment, flags

_RULES = ("sgd", "adam", "adamw", "adagrad")


def machine_facts(config_dir: str | None = None) -> dict:
    """What `mprun doctor --json` prints; `mprun.cli.doctor.KEYS` says what each key holds.

    config_dir: a further folder of the user's own options, for its modes. Pins this process's
    numeric flags as a run in FP32 does. On a GPU it compiles and runs small kernels and waits for
    them; what fails there is an answer and raises nothing.
    """
    device, why_no_gpu = _device()
    stock = flags()
    pin_math_flags("ieee")
    meter = meter_of(device)
    return {
        "device": str(device),
        "why_no_gpu": why_no_gpu,
        "machine": _machine(environment(device)),
        # Before anything below takes memory there.
        "gpus": [] if why_no_gpu else [_gpu(i) for i in range(torch.cuda.device_count())],
        "kernels": {"cpu": _cpu_kernels(), "cuda": _cuda_kernels(device, meter)},
        "fused_updates": {rule: _asked(partial(_why_not_fused, rule, device)) for rule in _RULES},
        "single_pass": {rule: _single_pass(rule, device) for rule in _RULES},
        "cuda_graph": _cuda_graph(device),
        "nvml": _nvml(meter),
        "modes": {
            name: {"verdict": v, "reason": why} for name, v, why in modes(device, config_dir)
        },
        "emulated_operations": _emulated_operations() if device.type == "cpu" else [],
        "flags": {name: {"pinned": v, "stock": stock[name]} for name, v in flags().items()},
    }


def modes(device: torch.device, config_dir: str | None = None) -> list[tuple[str, str, str]]:
    """(mode, "honoured" | "emulated" | "refused", how or why) for every mode on `device`."""
    rows = []
    for name in mode_files(config_dir):
        try:
            policy = _policy(name, config_dir)
        except BadInput as error:
            rows.append((name, "refused", str(error)))
            continue
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


def _policy(name: str, config_dir: str | None) -> PrecisionPolicy:
    """mprun's own straight from its file; one of the user's is checked, as for a run."""
    if name in mode_files():
        return get_policy(name)
    composed = compose_config([f"precision={name}"], config_dir, files=False)
    return policy_from(composed.config.precision)


def _on_a_cpu(policy: PrecisionPolicy, device: torch.device) -> str:
    text = f"{ForwardContext(policy, device).kind()} products: FP32 sums, rounded once on store"
    return text + ("; cpu_half=native has no LSTM here" if _no_lstm(policy, device) else "")


def _on_a_gpu(policy: PrecisionPolicy, device: torch.device) -> str:
    # Tensor Cores came with compute capability 7.0 (NVIDIA Volta).
    half = policy.half_dtype or policy.param_dtype
    cores = torch.cuda.get_device_capability(device) >= (7, 0)
    where = "on Tensor Cores" if cores else "without Tensor Cores (compute capability below 7.0)"
    text = f"native-{DTYPE_NAMES[half]} products {where}, FP32 sums"
    missing = _no_lstm(policy, device)
    return text + (f"; model=lstm_lm refused: {missing}" if missing else "")


def _no_lstm(policy: PrecisionPolicy, device: torch.device) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _asked(lambda: why_no_lstm(policy, device))["why"]


def _device() -> tuple[torch.device, str | None]:
    """The device of a run with device=auto, and why it is no GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error says the same
            torch.cuda.init()
            if torch.cuda.is_available():
                return torch.device("cuda", 0), None
        why = "torch.cuda.is_available() is False"
    except Exception as error:  # of whatever kind: it is what there is to say
        why = _reason(error)
    built = torch.version.cuda or torch.version.hip
    build = f"torch is built for CUDA {built}" if built else "torch is built without CUDA"
    return torch.device("cpu"), f"{build}: {why}"


def _machine(found: dict) -> dict:
    names = ("cpu", "cpu_count", "threads", "platform", "python", "packages")
    return {
        **{name: found[name] for name in (*names, "mprun", "commit", "dirty")},
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def _gpu(index: int) -> dict:
    gpu = torch.cuda.get_device_properties(index)
    free, why = None, None
    try:
        free = torch.cuda.mem_get_info(index)[0]
    except RuntimeError as error:  # another process may hold all of it, or the GPU itself
        why = _reason(error)
    return {
        "index": index,
        "name": gpu.name,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "total_bytes": gpu.total_memory,
        "free_bytes": free,
        "why": why,
    }


def _cpu_kernels() -> dict:
    # Which of these torch can tell depends on its version.
    units = {
        "AVX-512 BF16": "_is_avx512_bf16_supported",
        "AMX BF16": "_is_amx_tile_supported",
        "AMX FP16": "_is_amx_fp16_supported",
    }
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.is_available(),
        "units_16_bit": [n for n, a in units.items() if getattr(torch.cpu, a, lambda: False)()],
    }


def _cuda_kernels(device: torch.device, meter: PowerMeter) -> dict | None:
    if device.type == "cpu":
        return None
    return {
        "version": torch.version.cuda,
        "driver": meter.driver(),
        "cudnn": torch.backends.cudnn.version(),
        "tf32": torch.cuda.get_device_capability(device) >= (8, 0),
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }


def _why_not_fused(rule: str, device: torch.device) -> str | None:
    return None if has_fused_kernel(rule, device) else f"torch has none for {device.type}"


def _single_pass(rule: str, device: torch.device) -> dict:
    if device.type == "cpu":
        why = "its kernels need a GPU; a CPU runs torch's fused update in blocks"
        return {"works": None, "why": why}
    from mprun.precision.update_choice import why_not_on

    return _asked(lambda: why_not_on(device, rule))


def _cuda_graph(device: torch.device) -> dict:
    if device.type == "cpu":
        return {"works": None, "why": "needs a GPU"}
    from mprun.execution.graphed_step import why_no_replay_on

    return _asked(lambda: why_no_replay_on(device))


def _asked(why_not: Callable[[], str | None]) -> dict:
    try:
        why = why_not()
    except Exception as error:  # a full or broken GPU: that is the answer
        why = _reason(error)
    return {"works": why is None, "why": why}


def _nvml(meter: PowerMeter) -> dict:
    why = meter.why.get("device")
    readings = dict.fromkeys(("power_w", "sm_clock_mhz", "temperature_c"))
    values = {
        "energy_mj": meter.energy_mj(),
        **(readings | meter.sample()),
        "process_bytes": meter.process_bytes(),
    }
    # Without the GPU itself each reading would only say that again.
    missing = dict(meter.why) if why is None else {}
    return {"works": why is None, "why": why, **values, "missing": missing}


def _emulated_operations() -> list[str]:
    from mprun.precision.emulation import routes

    return sorted({name for name, _ in routes().values() if not name.endswith("_")} | {"lstm"})


def _reason(error: Exception) -> str:
    """Its first sentence: CUDA's say more about remedies than about the cause."""
    line = str(error).strip().partition("\n")[0]
    return line.partition(". ")[0] or type(error).__name__
