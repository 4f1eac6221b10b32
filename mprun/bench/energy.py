"""Energy, power, clock, temperature and process memory of the GPU, from NVML.

NVML is the driver's own library, read here through ctypes: it needs no package. Every reading is a
number or None; `why` then says what NVML answered. Source: NVML API reference, device queries
(nvmlDeviceGetTotalEnergyConsumption: millijoules since the driver was loaded, Volta and later).
"""

import ctypes
import os

_LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK, _GPU_TEMPERATURE = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU
_UNAVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE of an unsigned long long
_PROCESSES = 256


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class PowerMeter:
    """The sensors of one GPU.

    uuid: as torch gives it, with or without "GPU-" in front; None: no GPU, every reading is None.
    library: file name of NVML.
    """

    def __init__(self, uuid: str | None, library: str = _LIBRARY):
        self.why: dict[str, str] = {}
        self._nvml = self._device = None
        if uuid is None:
            self.why["device"] = "no NVIDIA GPU in use"
            return
        try:
            nvml = ctypes.CDLL(library)
            nvml.nvmlErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            self.why["device"] = str(error)  # which names the library
            return
        self._nvml = nvml
        device = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        found = self._call("device", "nvmlInit_v2") and self._call(
            "device", "nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(device)
        )
        self._device = device if found else None

    def energy_mj(self) -> int | None:
        """Millijoules since the driver was loaded; the difference of two readings is a use."""
        value = ctypes.c_ulonglong()
        done = self._read("energy", "nvmlDeviceGetTotalEnergyConsumption", ctypes.byref(value))
        return value.value if done else None

    def sample(self) -> dict[str, float]:
        """What can be read now of power_w, sm_clock_mhz and temperature_c."""
        readings = (
            ("power_w", "nvmlDeviceGetPowerUsage", (), 1000),
            ("sm_clock_mhz", "nvmlDeviceGetClockInfo", (_SM_CLOCK,), 1),
            ("temperature_c", "nvmlDeviceGetTemperature", (_GPU_TEMPERATURE,), 1),
        )
        values = {}
        for name, function, arguments, unit in readings:
            value = ctypes.c_uint()
            if self._read(name, function, *arguments, ctypes.byref(value)):
                values[name] = value.value / unit
        return values

    def process_bytes(self) -> int | None:
        """GPU memory of this process as the driver counts it, context included.

        None where the driver does not tell, as for a process in another PID namespace.
        """
        count, processes = ctypes.c_uint(_PROCESSES), (_Process * _PROCESSES)()
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        if not self._read("process_memory", name, ctypes.byref(count), processes):
            return None
        for process in processes[: count.value]:
            if process.pid == os.getpid() and process.used != _UNAVAILABLE:
                return process.used
        self.why["process_memory"] = f"NVML lists no process {os.getpid()} (another PID namespace?)"
        return None

    def driver(self) -> str | None:
        """The driver's version."""
        text = ctypes.create_string_buffer(96)
        done = self._read_system("driver", "nvmlSystemGetDriverVersion", text, 96)
        return text.value.decode() if done else None

    def _read(self, what: str, function: str, *arguments) -> bool:
        if self._device is None:
            self.why.setdefault(what, self.why.get("device", "no device"))
            return False
        return self._call(what, function, self._device, *arguments)

    def _read_system(self, what: str, function: str, *arguments) -> bool:
        return self._nvml is not None and self._call(what, function, *arguments)

    def _call(self, what: str, function: str, *arguments) -> bool:
        call = getattr(self._nvml, function, None)
        if call is None:
            self.why[what] = f"{function}: this driver does not have it"
            return False
        code = call(*arguments)
        if code != 0:
            text = self._nvml.nvmlErrorString(code)
            self.why[what] = f"{function}: {text.decode() if text else code}"
        return code == 0


def meter_of(device) -> PowerMeter:
    """The sensors of a torch device; of a CPU none can be read."""
    if device.type != "cuda":
        return PowerMeter(None)
    import torch

    return PowerMeter(str(torch.cuda.get_device_properties(device).uuid))
