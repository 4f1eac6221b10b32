"""Choose how BatchNorm with ReLU is computed: do the kernels work here, are they faster?

They add up in another order than cuDNN, so the choice changes bits: it is made once in a run.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mprun.config.execution_rules import why_no_fused_norm
from mprun.config.schema import RunConfig
from mprun.errors import BadInput
from mprun.extensions.fused_norm.modules import (
    FINISH_LANES,
    computed,
    install,
    norm_relu,
    pairs_of,
    plan,
)
from mprun.precision import PrecisionPolicy
from mprun.precision.torch_update import is_granted
from mprun.tasks import Task

# Images, channels, height and width: chunks of two tiles; channels that fill no block, rows that
# fill no tile; maps of one pixel.
SHAPES = ((1430, 24, 7, 7), (5, 136, 9, 11), (3, 70, 1, 1))
_NUMBERS, _PIXELS = 2**24, 16  # of maps that are timed, larger than a GPU's cache; of their side
_TURNS, _AHEAD = 5, 100
_LEAST_GAIN = 0.97  # of the time of the separate modules, which round as users expect


def fuse(
    config: RunConfig,
    task: Task,
    policy: PrecisionPolicy,
    device: torch.device,
    earlier: str | None = None,
) -> str:
    """Let the networks compute as train.fused_norm says; return "on" or "off: " and the reason.

    earlier: what it returned before, for a run that goes on. A measurement may end otherwise, and
    would change the bits of the run.

    Raises:
        BadInput: the kernels are asked for but impossible.
    """
    wanted = config.train.fused_norm
    if earlier is not None and earlier.startswith("off"):
        return earlier
    casts = [learner.cast for learner in task.learners.values()]
    pairs = [pair for cast in casts for pair in pairs_of(cast.module)]
    why = why_no_fused_norm(config, device.type)
    if why is None and not pairs:
        why = "the network has no nn.BatchNorm2d before an nn.ReLU in a known module"
    why = why or why_not_on(device, policy)
    found = "on" if why is None else f"off: {why}"
    if why is not None and (wanted == "on" or earlier is not None):
        given = "" if wanted == "on" else "the run began with it on, and "
        raise BadInput(f"train.fused_norm={wanted}: {given}{why} (allowed: off)")
    if wanted == "auto" and earlier is None and why is None:
        if config.deterministic:
            found = "off: deterministic=true, and a measurement is not repeatable"
        elif task.ranks.world > 1:
            found = "off: ranks could measure otherwise; set it to on"
        else:
            faster, times = choose(pairs, policy, device)
            found = f"on: {times}" if faster else f"off: {times}"
    if found.startswith("on"):
        for cast in casts:
            install(cast, device)
    return earlier or found


def choose(
    pairs: Iterable[tuple[nn.BatchNorm2d, bool]], policy: PrecisionPolicy, device: torch.device
) -> tuple[bool, str]:
    """Return whether the kernels are faster on `device` for these layers, and the times.

    They need not work there. It waits for the device.
    """
    dtype = policy.half_dtype or torch.float32
    layers = Counter((norm.num_features, adds) for norm, adds in pairs)
    separate = fused = 0.0
    for (channels, adds), number in layers.items():
        times = _milliseconds(channels, adds, dtype, policy.norm_dtype, device)
        separate, fused = separate + number * times[0], fused + number * times[1]
    found = f"{fused:.3g} ms against {separate:.3g} ms of separate modules, 2^24 numbers in each"
    return fused < _LEAST_GAIN * separate, found


def why_not_on(device: torch.device, policy: PrecisionPolicy) -> str | None:
    """Return why the kernels cannot be used on `device`, or None. Waits for the device."""
    if is_granted():
        return None
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    try:
        dtype = policy.half_dtype or torch.float32
        for adds in (False, True):
            for shape in SHAPES:
                for what, (different, _) in differences(
                    shape, adds, dtype, policy.norm_dtype, device
                ).items():
                    if different:
                        return f"its kernels differ from separate operations here in {what}"
    except Exception as error:  # a compiler or a driver may raise anything
        if "out of memory" in str(error):  # Triton's, too: says nothing about the kernels
            raise
        line = str(error).strip().partition("\n")[0]
        return f"its kernels do not run here ({type(error).__name__}: {line})"
    return None


def differences(
    shape: tuple[int, ...],
    adds: bool,
    dtype: torch.dtype,
    norm_dtype: torch.dtype,
    device: torch.device,
    relu: bool = True,
) -> dict[str, tuple[int, int]]:
    """Compare the kernels with torch's operations on made values, infinity and NaN among them.

    Returns:
        result -> how many numbers differ, and of how many; a NaN equals a NaN.
    """
    norm, x, residual, gradient = _made(shape, dtype, norm_dtype, device)
    expected = separate(norm, x, residual if adds else None, gradient, relu)
    inputs = [x.requires_grad_(), *([residual.requires_grad_()] if adds else [])]
    y = computed(norm, x, residual if adds else None, relu=relu)
    y.backward(gradient)
    gradients = dict(zip(("of_x", "of_residual"), (one.grad for one in inputs), strict=False))
    found = {"y": y, **gradients, "of_weight": norm.weight.grad, "of_bias": norm.bias.grad}
    found |= {"running_mean": norm.running_mean, "running_var": norm.running_var}
    return {what: _apart(found[what], value) for what, value in expected.items()}


def _apart(one: Any, other: Tensor) -> tuple[int, int]:
    same = (one == other) | (one.isnan() & other.isnan())
    return int((~same).sum()), same.numel()


def _made(
    shape: tuple[int, ...], dtype: torch.dtype, norm_dtype: torch.dtype, device: torch.device
) -> tuple[nn.BatchNorm2d, Tensor, Tensor, Tensor]:
    """Return a BatchNorm, maps, a residual and a gradient; some channels have special values."""
    random = torch.Generator().manual_seed(0)
    channels = shape[1]
    maps = [torch.randn(shape, generator=random) for _ in range(3)]
    spread = torch.randn(channels, generator=random)[:, None, None]
    maps[0] = maps[0] * spread.exp2() + 8 * spread
    for number, special in enumerate((0.0, torch.inf, -torch.inf, torch.nan, 1e-7, 6e4, 1e-30)):
        place = number % channels
        if number in (0, 4, 6):  # no variance; a variance far below eps, subnormal in FP16
            maps[0][:, place] = special * (maps[0][:, place] if special else 1)
        else:
            maps[0][-1, place, -1, -1] = special
        maps[1 + number % 2][0, (number + 7) % channels, 0, 0] = special
    norm = nn.BatchNorm2d(channels)
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        assert tensor is not None
        tensor.data = torch.randn(channels, generator=random)
    norm = norm.to(device, norm_dtype)
    x, residual, gradient = (
        one.to(device, dtype).contiguous(memory_format=torch.channels_last) for one in maps
    )
    return norm, x, residual, gradient


def _added(lanes: Tensor) -> Tensor:
    """Add up [..., lanes, channels], the second half to the first."""
    while lanes.size(-2) > 1:
        first, second = lanes.chunk(2, -2)
        lanes = first + second
    return lanes.squeeze(-2)


def _tiles(matrix: Tensor, lanes: int, steps: int) -> Tensor:
    """Return [chunks, steps, lanes, channels], filled up with zeros."""
    missing = -len(matrix) % (lanes * steps)
    return F.pad(matrix, (0, 0, 0, missing)).view(-1, steps, lanes, matrix.size(1))


def _sums(matrix: Tensor, lanes: int, steps: int) -> Tensor:
    """Return each chunk's sum, [chunks, channels]: tile by tile, then over the lanes."""
    found = torch.zeros((), device=matrix.device)
    for tile in _tiles(matrix, lanes, steps).unbind(1):
        found = found + tile
    return _added(found)


def _sum(parts: Tensor) -> Tensor:
    return _sums(parts, FINISH_LANES, -(-len(parts) // FINISH_LANES)).squeeze(0)


def separate(
    norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None, gradient: Tensor, relu: bool = True
) -> dict[str, Tensor]:
    """Compute what the kernels do in torch's operations, one after the other, forward and backward.

    Names of results: y, of_x, of_residual, of_weight, of_bias, running_mean, running_var. `norm`
    stays as it is.
    """
    values = _as_matrix(x).float()
    rows, channels = values.shape
    count = torch.tensor(float(rows), device=x.device)  # a GPU multiplies by 1 / a number
    lanes, _, steps, chunks = plan(rows, channels)
    starts = torch.arange(chunks, device=x.device)[:, None] * (lanes * steps)
    counts = (rows - starts).clamp(max=lanes * steps).float()
    first = (rows - starts).clamp(max=lanes).float()
    shift = _added(_tiles(values, lanes, steps)[:, 0]) / first
    apart = values - shift.repeat_interleave(lanes * steps, 0)[:rows]
    total, squares = _sums(apart, lanes, steps), _sums(apart * apart, lanes, steps)
    squares = squares - total * total / counts
    squares = torch.where(squares < 0, 0.0, squares)
    means = shift + total / counts
    mean = _sum(counts / count * means)
    apart = means - mean
    squares = _sum(squares + counts * (apart * apart))
    # In FP64: a CPU's sqrt in FP32 is not always the nearest number.
    inverse = 1 / (squares / count + norm.eps).double().sqrt().float()
    momentum, moved = norm.momentum or 0.0, {}
    news = {"running_mean": mean, "running_var": squares / (count - 1)}
    for name, new in news.items():
        old = norm.get_buffer(name)
        moved[name] = ((1 - momentum) * old.float() + momentum * new).to(old.dtype)

    gain, shift = norm.weight.detach().float(), norm.bias.detach().float()
    value = (values - mean) * inverse
    y = _as_maps((value * gain + shift).to(x.dtype), x)
    y = y if residual is None else y + residual
    y = y.relu() if relu else y
    passed = torch.where(y <= 0, 0.0, gradient) if relu else gradient
    own = _as_matrix(passed).float()
    of_bias, of_weight = (_sum(_sums(one, lanes, steps)) for one in (own, own * value))
    of_x = (own - of_bias / count - value * (of_weight / count)) * (gain * inverse)
    found = {"y": y, "of_x": _as_maps(of_x.to(x.dtype), x)}
    found |= {"of_weight": of_weight.to(norm.weight), "of_bias": of_bias.to(norm.weight)}
    return found | moved | ({} if residual is None else {"of_residual": passed})


def _as_matrix(maps: Tensor) -> Tensor:
    return maps.permute(0, 2, 3, 1).reshape(-1, maps.size(1))


def _as_maps(matrix: Tensor, like: Tensor) -> Tensor:
    images, channels, height, width = like.shape
    return matrix.view(images, height, width, channels).permute(0, 3, 1, 2)


def _milliseconds(
    channels: int, adds: bool, dtype: torch.dtype, norm_dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Return the device's times of a forward and a backward pass, by separate modules and fused."""
    size = (-(-_NUMBERS // (channels * _PIXELS**2)), channels, _PIXELS, _PIXELS)
    random = torch.Generator(device).manual_seed(0)  # the run's own numbers stay as they are
    x, residual, gradient, filled = (
        torch.randn(size, dtype=dtype, device=device, generator=random).contiguous(
            memory_format=torch.channels_last
        )
        for _ in range(4)
    )
    norm, relu = nn.BatchNorm2d(channels).to(device, norm_dtype), nn.ReLU(inplace=True)
    inputs = [x.requires_grad_(), *([residual.requires_grad_()] if adds else [])]

    def modules() -> Tensor:
        found = norm(x)
        if adds:
            found += residual
        return relu(found)

    def fused() -> Tensor:
        return norm_relu(norm, relu, device.type, *inputs)

    ways: list[Callable[[], Tensor]] = [modules, fused]
    times: list[list[float]] = [[], []]
    for turn in range(_TURNS + 1):
        for way, own in zip(ways, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(_AHEAD):  # the device has work while the host launches
                filled.add_(gradient)
            begin.record()
            torch.autograd.grad(way(), [*inputs, norm.weight, norm.bias], gradient)
            end.record()
            end.synchronize()
            if turn:  # the first compiles
                own.append(begin.elapsed_time(end))
    return median(times[0]), median(times[1])
