"""Energy, power, clock, temperature and process memory of the GPU, from NVML (nvidia-ml-py).

Every reading is a number or None; for None `why` holds NVML's answer. Source: NVML API reference,
device queries (nvmlDeviceGetTotalEnergyConsumption: millijoules since the driver was loaded, Volta
and later).
"""

import os
from typing import Any

import pynvml
import torch

_SENSORS = {  # name -> (function, arguments, divisor to our unit)
    "power_w": ("nvmlDeviceGetPowerUsage", (), 1000),
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", (pynvml.NVML_CLOCK_SM,), 1),
    "temperature_c": ("nvmlDeviceGetTemperature", (pynvml.NVML_TEMPERATURE_GPU,), 1),
}


class PowerMeter:
    """The sensors of one GPU, by torch's UUID, with or without "GPU-" in front; None: none."""

    def __init__(self, uuid: str | None):
        self.why: dict[str, str] = {}
        self._device = None
        if uuid is None:
            self.why["device"] = "no NVIDIA GPU in use"
            return
        self._call("device", "nvmlInit")
        if not self.why:
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._device = self._call("device", "nvmlDeviceGetHandleByUUID", name)

    def energy_mj(self) -> int | None:
        """Return the millijoules since the driver was loaded; two readings give a consumption."""
        return self._read("energy", "nvmlDeviceGetTotalEnergyConsumption")

    def sample(self) -> dict[str, float]:
        """Return the readable ones of power_w, sm_clock_mhz and temperature_c."""
        read = {name: self._read(name, call, *more) for name, (call, more, _) in _SENSORS.items()}
        return {name: n / _SENSORS[name][2] for name, n in read.items() if n is not None}

    def process_bytes(self) -> int | None:
        """Return the GPU memory of this process as the driver counts it, context included.

        None if the driver does not list the process, as in another PID namespace.
        """
        what, function = "process_memory", "nvmlDeviceGetComputeRunningProcesses_v3"
        processes = self._read(what, function)
        for process in processes or ():
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return process.usedGpuMemory
        if processes is not None:
            self.why[what] = f"NVML lists no process {os.getpid()} (another PID namespace?)"
        return None

    def driver(self) -> str | None:
        """Return the driver's version, even if the GPU itself is not found."""
        if self.why.get("device", "").startswith(("no NVIDIA GPU", "nvmlInit")):
            return None
        return self._call("driver", "nvmlSystemGetDriverVersion")

    def _read(self, what: str, function: str, *arguments: Any) -> Any:
        if self._device is None:
            self.why.setdefault(what, self.why.get("device", "no device"))
            return None
        return self._call(what, function, self._device, *arguments)

    def _call(self, what: str, function: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, function)(*arguments)
        except pynvml.NVMLError as error:
            self.why[what] = f"{function}: {error}"
            return None


def meter_of(device: torch.device) -> PowerMeter:
    """Return the sensors of a torch device; a CPU has none."""
    if device.type != "cuda":
        return PowerMeter(None)
    return PowerMeter(str(torch.cuda.get_device_properties(device).uuid))
