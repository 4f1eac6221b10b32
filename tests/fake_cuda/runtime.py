"""A CUDA runtime without a device: the host side of CUDA code runs, and nothing is computed.

A preloaded library (`build`, `environment`) lets the CUDA build of torch believe in one GPU. These
are real: torch's allocator, streams, autograd and its device threads, autocast, cuDNN's handling of
RNN weights, `set_sync_debug_mode`, stream capture, CUDA graphs, and Triton compiling for that
device. So exceptions, warnings, host waits, captures, the chosen path, bytes of memory and numbers
of launches are meaningful.

**Values and device times are meaningless.** Kernels do nothing: losses are old memory, a run may
end as diverged, and comparisons of values need prescribed results. Memory does not include cuDNN's
workspaces. torch.compile runs where all kernels are Triton's and cuBLAS's. Libraries with a CUDA
runtime inside are not covered.
"""

import ctypes
import os
import re
import subprocess
import sysconfig
from pathlib import Path

SOURCES = ("runtime.c", "libraries.c")
# Functions that torch may call. Those that the sources do not define get a stub that succeeds.
_LIBRARIES = re.compile(r"^(__cuda|cuda|cublas|cudnn|cusolverDn|cusparse|cufft|curand|cu[A-Z])")
_COMPUTES = re.compile(r"^(cublas|cudnn)(?!Lt)(?!.*(Create|Destroy|Set|Get|Restore|Find|Backend))")
_HERE = Path(__file__).parent
# CUDA's headers come with torch, the macros for its compiler do not.
_HOST_DEFINES = """\
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
"""


def why_not() -> str | None:
    """Return why this torch cannot use the fake runtime; None: it can, if `build` succeeds."""
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not _headers():
        return "CUDA's headers (package nvidia-cuda-runtime) are not installed beside torch"
    return None


def build(folder: Path) -> None:
    """Build the library in `folder` (takes a second). RuntimeError says what is missing."""
    if (reason := why_not()) is not None:
        raise RuntimeError(reason)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "crt").mkdir(exist_ok=True)
    (folder / "crt" / "host_defines.h").write_text(_HOST_DEFINES)
    own = "\n".join((_HERE / name).read_text() for name in SOURCES)
    names = sorted(name for name in _asked_for() if not re.search(rf"\b{name}\(", own))
    (folder / "others.c").write_text("".join(map(_stub, names)))
    sources = [*(str(_HERE / name) for name in SOURCES), str(folder / "others.c")]
    includes = [f"-I{path}" for path in (folder, _HERE, *_headers())]
    _run("cc", "-O1", "-shared", "-fPIC", "-w", *includes, *sources, "-o",
         str(folder / "libfakecuda.so"), "-lpthread", "-ldl")  # fmt: skip
    # Triton, and torch's own lazy loading, look for the driver by its name.
    for name in ("libcuda.so.1", "libcuda.so"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("libfakecuda.so")


def environment(folder: Path, memory_bytes: int | None = None, devices: int = 1) -> dict[str, str]:
    """Return the variables with which a new process runs on the fake device of `folder`.

    memory_bytes: memory of the device; None: that of an H200. devices: numbers that it has.
    """
    variables = {
        "LD_PRELOAD": str(folder / "libfakecuda.so"),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
        "FAKE_CUDA_DEVICES": str(devices),
    }
    if memory_bytes is not None:
        variables["FAKE_CUDA_MEMORY"] = str(memory_bytes)
    return dict(os.environ) | variables


def _stub(name: str) -> str:
    if re.match(r"(cublas|cudnn|cusolver|cusparse)\w*Create", name):
        return f"int fake_make(void **);\nint {name}(void **made) {{ return fake_make(made); }}\n"
    if _COMPUTES.match(name):
        return f"int fake_compute(void *);\nlong {name}(void *h) {{ return fake_compute(h); }}\n"
    return f"long {name}(void) {{ return 0; }}\n"


def _asked_for() -> set[str]:
    """Return the names in CUDA's libraries that torch's libraries use and do not define."""
    import torch

    folder, found = Path(torch.__file__).parent / "lib", set()
    for pattern in ("libc10_cuda.so", "libtorch_cuda*.so", "libtorch_python.so", "libcaffe2*.so"):
        for path in folder.glob(pattern):
            for line in _run("nm", "-D", "--undefined-only", str(path)).splitlines():
                name = line.split()[-1].partition("@")[0]
                if _LIBRARIES.match(name):
                    found.add(name)
    # Triton compiles its own part against the driver, once.
    for path in (folder.parents[1] / "triton" / "backends" / "nvidia").glob("driver.*"):
        found.update(re.findall(r"\bcu[A-Z]\w+", path.read_text()))
    return found


def _headers() -> list[Path]:
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    return [path.parent for path in packages.glob("*/include/cuda_runtime_api.h")]


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not installed (a C compiler and binutils)") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        raise RuntimeError(f"{command[0]}: {(*lines, error.returncode)[0]}") from None
    return done.stdout


class Counts(ctypes.Structure):
    """The fields of counts.h, which describes each. `-` gives differences."""

    _fields_ = [
        (name, ctypes.c_ulong)
        for line in re.findall(r"unsigned long (.*);", (_HERE / "counts.h").read_text())
        for name in line.split(", ")
    ]

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name, *_ in self._fields_}

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, name) - getattr(other, name) for name, *_ in self._fields_))


def is_fake() -> bool:
    """Return whether this process runs on the fake device."""
    return hasattr(ctypes.CDLL(None), "fake_cuda_counts")


def counts() -> Counts:
    """Return a copy of the current counts; ValueError without the fake runtime."""
    return Counts.from_buffer_copy(Counts.in_dll(ctypes.CDLL(None), "fake_cuda_counts"))
