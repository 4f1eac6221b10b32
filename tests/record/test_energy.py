"""NVML: what it says without a driver, and that readings and units fit its C interface."""

import ctypes
import shutil
import subprocess
import time

import pynvml
import pytest
import torch

from mprun.record.energy import PowerMeter, meter_of

# The functions as nvml.h declares them, with readings that the tests know.
_LIBRARY = r"""
#include <string.h>
#include <unistd.h>
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } info;
typedef void *device;
static int handle; static unsigned long long energy = 5000000000ULL;
int nvmlInitWithFlags(unsigned int flags) { return 0; }
const char *nvmlErrorString(int code) { return code == 3 ? "Not Supported" : "other"; }
int nvmlSystemGetDriverVersion(char *text, unsigned int size) {
    if (size < 10) return 7;
    strcpy(text, "580.65.06"); return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device *found) {
    if (strcmp(uuid, "GPU-1234")) return 6;
    *found = &handle; return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(device d, unsigned long long *mj) {
    if (d != &handle) return 2;
    *mj = energy += 1500; return 0;
}
int nvmlDeviceGetPowerUsage(device d, unsigned int *mw) { *mw = 345678; return d != &handle; }
int nvmlDeviceGetClockInfo(device d, int type, unsigned int *mhz) {
    *mhz = 1900 + type; return d != &handle;
}
int nvmlDeviceGetTemperature(device d, int sensor, unsigned int *c) { return 3; }
int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned int *count, info *infos) {
    if (*count < 2) return 7;
    infos[0].pid = 1; infos[0].used = 11;
    infos[1].pid = getpid(); infos[1].used = 1ULL << 33;
    *count = 2; return 0;
}
"""


@pytest.fixture
def nvml(monkeypatch):
    """``nvml(library)``: what pynvml has for NVML then; None: it looks for the driver's."""

    def load(library):
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    return load


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    source, built = folder / "nvml.c", folder / "libnvidia-ml-test.so"
    source.write_text(_LIBRARY, encoding="utf-8")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source], check=True)
    return ctypes.CDLL(str(built))


def test_readings_in_their_units(nvml, built):
    nvml(built)
    meter = PowerMeter("1234")
    first = meter.energy_mj()
    assert first > 2**32  # unsigned long long
    assert meter.energy_mj() - first == 1500
    assert meter.sample() == {"power_w": 345.678, "sm_clock_mhz": 1901.0}
    assert meter.driver() == "580.65.06"
    assert meter.process_bytes() == 2**33
    assert meter.why == {"temperature_c": "nvmlDeviceGetTemperature: Not Supported"}


def test_another_gpu_is_not_read_instead(nvml, built):
    nvml(built)
    meter = PowerMeter("GPU-99")
    assert meter.energy_mj() is None and meter.sample() == {}
    assert meter.why["energy"] == "nvmlDeviceGetHandleByUUID: Not Found"
    assert meter.driver() == "580.65.06"


def test_without_a_driver_every_reading_is_none_and_says_why(nvml, monkeypatch):
    nvml(None)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(f"{name}.that-is-not-there"))
    meter = PowerMeter("1234")
    assert meter.energy_mj() is None and meter.process_bytes() is None
    assert meter.sample() == {} and meter.driver() is None
    assert meter.why["energy"] == "nvmlInit: NVML Shared Library Not Found"


def test_a_cpu_has_no_meter():
    meter = meter_of(torch.device("cpu"))
    assert meter.energy_mj() is None
    assert meter.why["energy"] == "no NVIDIA GPU in use"


@pytest.mark.gpu
def test_energy_grows_with_work_or_nvml_says_why_not():
    device = torch.device("cuda", torch.cuda.current_device())
    meter = meter_of(device)
    before = meter.energy_mj()
    if before is None:
        assert meter.why["energy"]
        return
    matrix = torch.rand(4096, 4096, device=device)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        matrix @ matrix
        torch.cuda.synchronize()
    # At least 20 W: an idle GPU draws more.
    assert meter.energy_mj() - before > 20_000
