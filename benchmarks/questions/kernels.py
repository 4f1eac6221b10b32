"""The kernels that run, their times, and the host's time to launch them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mprun.precision import pin_math_flags
from questions.answer import Answer, milliseconds, wall_us

LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
OPERATIONS = 500


def batch_norm_backend(device: torch.device) -> Answer:
    """Find out whether cuDNN or torch's kernel computes BatchNorm in 16 bits, and its cost."""
    rows, numbers = [], {}
    for dtype in (torch.float16, torch.bfloat16):
        for layout, memory_format in LAYOUTS.items():
            for parameters in (torch.float32, dtype):
                x = torch.randn(64, 256, 56, 56, device=device, dtype=dtype)
                x = x.to(memory_format=memory_format).requires_grad_()
                layer = nn.BatchNorm2d(256).to(device, parameters)
                dy = torch.randn_like(x)
                backward = _backward(layer(x), (x, *layer.parameters()), dy)
                found = {
                    "backend": _selected_backend(layer, x),
                    "forward kernels": _kernel_names(lambda x=x, layer=layer: layer(x)),
                    "backward kernels": _kernel_names(backward),
                    "forward_us": 1000 * milliseconds(lambda x=x, layer=layer: layer(x)),
                    "backward_us": 1000 * milliseconds(backward),
                }
                size = x.numel() * x.element_size()
                # Read twice and written once; backward reads x and dy twice and writes dx.
                found["forward_GB_s"] = 3 * size / found["forward_us"] / 1e3
                found["backward_GB_s"] = 5 * size / found["backward_us"] / 1e3
                kind, held = (str(d).removeprefix("torch.") for d in (dtype, parameters))
                numbers[f"{kind} {layout}, {held} parameters"] = found
                rows.append(
                    (
                        kind,
                        layout,
                        held,
                        found["backend"],
                        _short(found["forward kernels"]),
                        f"{found['forward_us']:.0f}",
                        f"{found['backward_us']:.0f}",
                        f"{found['forward_GB_s']:.0f} / {found['backward_GB_s']:.0f}",
                    )
                )
    usual = [row for row in rows if row[1] == "NHWC" and row[2] == "float32"]
    text = "NHWC with FP32 parameters: " + "; ".join(
        f"{row[0]} by {row[3]}, forward {row[5]} us, backward {row[6]} us" for row in usual
    )
    header = ("dtype", "layout", "parameters", "backend", "kernels, forward")
    header += ("forward us", "backward us", "GB/s")
    return Answer(text + " (64 x 256 x 56 x 56).", numbers, header, tuple(rows))


def _backward(output: Tensor, inputs: tuple[Tensor, ...], gradient: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def _selected_backend(layer: nn.BatchNorm2d, x: Tensor) -> str:
    select = getattr(torch._C, "_select_batch_norm_backend", None)
    if select is None:
        return "not told"
    statistics = layer.running_mean, layer.running_var
    return select(x, layer.weight, layer.bias, *statistics, True, layer.eps).name


def _kernel_names(run: Callable[[], object]) -> list[str]:
    """Return the names of the CUDA kernels of one call; empty if the profiler sees none."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_device]


def _short(names: list[str]) -> str:
    """Join the names without template arguments, 60 characters each."""
    plain = [name.partition("<")[0].removeprefix("void ")[:60] for name in names]
    return ", ".join(dict.fromkeys(plain)) or "none seen by the profiler"


def first_convolution(device: torch.device) -> Answer:
    """Find out whether NHWC or padded channels pay in ResNet-50's stem (3 channels)."""
    torch.backends.cudnn.benchmark = True
    kinds = [
        ("FP16", torch.float16, "ieee"),
        ("BF16", torch.bfloat16, "ieee"),
        ("TF32", torch.float32, "tf32"),
        ("FP32", torch.float32, "ieee"),
    ]
    rows, numbers = [], {}
    for name, dtype, math in kinds:
        pin_math_flags(math)
        for layout, memory_format in LAYOUTS.items():
            for channels in (3, 4, 8):
                x = torch.randn(256, channels, 224, 224, device=device, dtype=dtype)
                weight = torch.randn(64, channels, 7, 7, device=device, dtype=dtype)
                x, weight = (t.to(memory_format=memory_format) for t in (x, weight))
                weight.requires_grad_()
                output = F.conv2d(x, weight, stride=2, padding=3)
                dy = torch.randn_like(output)
                forward = milliseconds(
                    lambda x=x, w=weight: F.conv2d(x, w, stride=2, padding=3), windows=5
                )
                backward = milliseconds(_backward(output, (weight,), dy), windows=5)
                numbers[f"{name} {layout} {channels} channels"] = {
                    "forward_ms": forward,
                    "weight_gradient_ms": backward,
                }
                rows.append((name, layout, str(channels), f"{forward:.3f}", f"{backward:.3f}"))
                del x, weight, output, dy
        torch.cuda.empty_cache()
    pin_math_flags("ieee")
    total = {key: sum(value.values()) for key, value in numbers.items()}
    text = "Forward and weight gradient, batch 256, 224 px: " + "; ".join(
        f"{name} "
        + ", ".join(f"{layout} {total[f'{name} {layout} 3 channels']:.2f} ms" for layout in LAYOUTS)
        + f", NHWC padded to 8 {total[f'{name} NHWC 8 channels']:.2f} ms"
        for name, _, _ in kinds
    )
    header = ("dtype", "layout", "channels", "forward ms", "weight gradient ms")
    return Answer(text + ".", numbers, header, tuple(rows))


def host_time(device: torch.device) -> Answer:
    """Measure host microseconds of each eager operation and each node of a replayed graph."""
    x = torch.ones(32, device=device)
    small = torch.ones(32, 32, device=device)
    weight = torch.ones(32, 32, device=device, requires_grad=True)

    def added() -> None:
        for _ in range(OPERATIONS):
            x.add_(1)

    def multiplied() -> None:
        for _ in range(OPERATIONS):
            small @ small

    def with_graph() -> None:
        y = small
        for _ in range(OPERATIONS):
            y = y @ weight
        y.sum().backward()

    numbers = {
        "x.add_(1)": wall_us(added, device) / OPERATIONS,
        "matrix product": wall_us(multiplied, device) / OPERATIONS,
        "matrix product, forward and its two backward": wall_us(with_graph, device) / OPERATIONS,
    }
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        added()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            added()
        numbers["replay of a graph, host, per node"] = wall_us(graph.replay, device) / OPERATIONS
        numbers["replay of a graph, device, per node"] = (
            1000 * milliseconds(graph.replay) / OPERATIONS
        )
    text = ", ".join(f"{name} {value:.2f} us" for name, value in numbers.items())
    return Answer(text + ".", numbers)
