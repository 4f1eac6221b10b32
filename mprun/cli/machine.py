"""This machine and what runs on it, as plain values: the facts behind `mprun doctor`."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from mprun.assembly import policy_from
from mprun.config.compose import compose_config
from mprun.config.option_files import modes as mode_files
from mprun.distributed.rank_info import rank_info_from
from mprun.errors import BadInput
from mprun.execution.graphed_step import why_no_replay_on
from mprun.precision import (
    ForwardContext,
    get_policy,
    pin_math_flags,
    read_math_flags,
    why_no_lstm,
    why_unsupported,
)
from mprun.precision.emulated_operations import PRODUCTS
from mprun.precision.scaled_products import how_multiplied
from mprun.precision.torch_update import RULES, STATE, has_fused_kernel
from mprun.record.energy import PowerMeter, meter_of
from mprun.recording.environment import environment

_T = TypeVar("_T")
UNTESTED = "no time left"


def machine_facts(config_dir: str | None = None, ends: float | None = None) -> dict:
    """Return the facts that `mprun doctor --json` prints; `mprun.cli.doctor.KEYS` has their keys.

    It pins this process's numeric flags as a run in FP32 does. On a GPU it compiles and runs small
    kernels and waits for them; a failure there is an answer and raises nothing.

    ends: time.monotonic at which the test under way is cut, and after which none begins. Only the
    main thread can say it.
    """
    device, why_no_gpu = _device()
    stock = read_math_flags()
    pin_math_flags("ieee")
    flags = read_math_flags()
    rules = [rule for rule in RULES if rule in STATE]
    no_graph = {"works": None, "why": "needs a GPU"}
    meter, emulated = meter_of(device), sorted({*PRODUCTS, "gru", "lstm", "rnn"})
    return {
        "device": str(device),
        "why_no_gpu": why_no_gpu,
        "machine": _machine(environment(device)),
        # Before the steps below use its memory.
        "gpus": [] if why_no_gpu else [_gpu(i) for i in range(torch.cuda.device_count())],
        "kernels": {"cpu": _cpu_kernels(), "cuda": _cuda_kernels(device, meter)},
        "fused_updates": {
            rule: _asked(partial(_why_not_fused, rule, device), ends) for rule in rules
        },
        "cuda_graph": no_graph if why_no_gpu else _asked(partial(why_no_replay_on, device), ends),
        "ranks": _ranks(),
        "nvml": _nvml(meter),
        "modes": modes(device, config_dir, ends),
        "emulated_operations": emulated if device.type == "cpu" else [],
        "flags": {name: {"pinned": v, "stock": stock[name]} for name, v in flags.items()},
    }


def _ranks() -> dict:
    """Return what several ranks would use, and whether this process is one of them."""
    backends = {}
    if dist.is_available():
        if dist.is_gloo_available():
            backends["gloo"] = ""
        if dist.is_nccl_available():
            backends["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    rank_info = rank_info_from()
    here = None if rank_info is None else {"world": rank_info.world, "rank": rank_info.rank}
    return {"backends": backends, "environment": here}


def modes(
    device: torch.device, config_dir: str | None = None, ends: float | None = None
) -> dict[str, dict[str, str]]:
    """Return mode -> verdict on `device`, and the reason; ends: as of `machine_facts`.

    A verdict is "honoured", "emulated", "refused" or, for lack of time, "untested".
    """
    verdicts = {
        name: _within(ends, partial(_verdict, name, device, config_dir), ("untested", UNTESTED))
        for name in mode_files(config_dir)
    }
    return {name: {"verdict": verdict, "reason": why} for name, (verdict, why) in verdicts.items()}


def _verdict(name: str, device: torch.device, config_dir: str | None) -> tuple[str, str]:
    try:  # mprun's mode straight from its file; a user's is checked, as for a run
        if name in mode_files():
            policy = get_policy(name)
        else:
            composed = compose_config([f"precision={name}"], config_dir, files=False)
            policy = policy_from(composed.config.precision)
    except BadInput as error:
        return "refused", str(error)
    if (refusal := why_unsupported(policy, device)) is not None:
        return "refused", refusal
    if not policy.formats:
        tf32 = policy.fp32_math == "tf32"
        return "honoured", "TF32 products, FP32 sums" if tf32 else "FP32 products"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        no_lstm = _asked(partial(why_no_lstm, policy, device))["why"]
    kind, matmul = ForwardContext(policy, device).kind(), policy.matmul
    how = f"; linear layers: {how_multiplied(matmul, device)}" if matmul else ""
    if device.type == "cpu":
        missing = "; cpu_half=native has no LSTM here" if no_lstm else ""
        return "emulated", f"{kind} products: FP32 sums, rounded once on store{how}{missing}"
    # Tensor Cores came with compute capability 7.0 (NVIDIA Volta).
    cores = torch.cuda.get_device_capability(device) >= (7, 0)
    where = "on Tensor Cores" if cores else "without Tensor Cores (compute capability below 7.0)"
    missing = f"; model=lstm_lm refused: {no_lstm}" if no_lstm else ""
    return "honoured", f"{kind} products {where}, FP32 sums{how}{missing}"


def _device() -> tuple[torch.device, str | None]:
    """Return the device of a run with device=auto, and why it is no GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error says the same
            torch.cuda.init()
            if torch.cuda.is_available():
                return torch.device("cuda", 0), None
        why = "torch.cuda.is_available() is False"
    except Exception as error:  # of any kind: it is the answer
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
    units = {"AVX-512 BF16": "avx512_bf16", "AMX BF16": "amx_tile", "AMX FP16": "amx_fp16"}
    found = torch.cpu.get_capabilities()
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.is_available(),
        "units_16_bit": [name for name, key in units.items() if found.get(key)],
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


def _asked(why_not: Callable[[], str | None], ends: float | None = None) -> dict:
    def answer() -> dict:
        try:
            why = why_not()
        except Exception as error:  # a full or broken GPU: that is the answer
            why = _reason(error)
        return {"works": why is None, "why": why}

    return _within(ends, answer, {"works": None, "why": UNTESTED})


class _TimeUp(BaseException):
    """The end of the time for tests; no handler of errors takes it for an answer."""


def _within(ends: float | None, test: Callable[[], _T], late: _T) -> _T:
    """Return the answer of a test, `late` if it has none at `ends`."""
    if ends is None:
        return test()
    if (left := ends - time.monotonic()) <= 0:
        return late
    before = signal.signal(signal.SIGALRM, _raise_time_up)
    try:
        # Again and again: an exception within a callback of the interpreter is lost.
        signal.setitimer(signal.ITIMER_REAL, left, 0.5)
        return test()
    except _TimeUp:
        return late
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise_time_up(number: int, frame: object) -> NoReturn:
    raise _TimeUp


def _nvml(meter: PowerMeter) -> dict:
    why = meter.why.get("device")
    values = {
        "energy_mj": meter.energy_mj(),
        **dict.fromkeys(("power_w", "sm_clock_mhz", "temperature_c")),
        **meter.sample(),
        "process_bytes": meter.process_bytes(),
    }
    # Without the GPU each reading would only repeat that.
    missing = dict(meter.why) if why is None else {}
    return {"works": why is None, "why": why, **values, "missing": missing}


def _reason(error: Exception) -> str:
    """Return the first sentence: CUDA's errors say more about remedies than about the cause."""
    line = str(error).strip().partition("\n")[0]
    return line.partition(". ")[0] or type(error).__name__
