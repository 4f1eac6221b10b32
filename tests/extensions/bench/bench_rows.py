"""Rows of bench.json, written down without measuring."""

from mprun.extensions.bench.summary import summarise


def window(rate: float, number: int, cohort: int = 1, **more) -> dict:
    """256 images in 1/rate of 256 seconds."""
    return {
        "cohort": cohort,
        "round": number,
        "steps": 1,
        "samples": 256,
        "seconds": 256 / rate,
        "energy_mj": None,
        "sensors": {},
        "data_wait_s": None,
        "loss_is_finite": True,
    } | more


def row(mode, contender, rates, *, label="ResNet-50 b256", cohort=1, real=False, **more) -> dict:
    case = {"label": label, "mode": mode, "contender": contender, "real_data": real}
    return {
        "key": f"{label} | {mode} | {contender}",
        "case": case,
        "status": "measured" if rates else "failed",
        "reason": "" if rates else "out of memory: tried to allocate 20 GiB",
        "kind": None if rates else "memory",
        "facts": {
            "build": {"sample": "image", "samples_per_step": 256},
            "prepare": {"first_use_s": 1.5, "flags": {"a": "ieee", "b": True}},
        },
        "equality": {"losses": [6.9], "skipped": 0, "ok": True, "reason": ""},
        "warm_up": {"steady": True, "apart": 0.01},
        "windows": [window(rate, number, cohort) for number, rate in enumerate(rates)],
        "details": {},
        "limit": {},
    } | more


def bench(rows: list[dict], **more) -> dict:
    summarise(rows)
    packages = {"torch": "2.11.0"}
    environment = {"dirty": True, "packages": packages, "mprun": "0.1.0", "commit": "abc"}
    environment |= {"python": "3.11", "platform": "Linux", "cpu": "a CPU", "cpu_count": 2}
    return {
        "device_name": "NVIDIA H200",
        "driver": "580.65",
        "created": "2026-01-01T00:00:00+00:00",
        "elapsed_s": 100.0,
        "ended": "complete",
        "options": {"budget_s": 540.0, "windows": 3},
        "nvml": {"energy": "nvmlInit_v2: Unknown Error"},
        "environment": environment,
        "ceilings": {"bandwidth": 4.3e12, "flops": {"fp16": 790e12}, "matmul_size": 8192},
        "left_out": [],
        "rows": rows,
    } | more


def lines_of(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]
