"""Skipped updates in torch.amp and mprun: scale 0, BatchNorm, a broken optimizer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mprun import prepare
from mprun.precision import DynamicLossScale, ForwardContext, get_policy
from questions.answer import Answer

# 2^16 halved 166 times is below half of float32's smallest number, 2^-149.
OVERFLOWS = 200


def grad_scaler_collapse(device: torch.device) -> Answer:
    """Let torch.amp.GradScaler overflow for long: does it reach scale 0, and what follows?"""
    rows = [_torch_scaler(device, fused) for fused in (False, True)]
    scale, collapsed, finite = _mprun_scale(device)
    reached = rows[0]["overflows until 0"]
    then = "; ".join(
        f"{row['optimizer']}: found_inf {row['found_inf on a healthy step']:g}, "
        f"{row['weights NaN']:.0%} of the weights NaN, scale {row['scale afterwards']:g}"
        for row in rows
    )
    text = (
        f"GradScaler's scale is 0 after {reached} overflows in a row. "
        if reached
        else f"GradScaler's scale is not 0 after {OVERFLOWS} overflows. "
    )
    text += (
        f"On a healthy step then - {then}. mprun's dynamic scale stays at its floor {scale:g}, "
        f"reports collapse {collapsed}, and the healthy step leaves "
        f"{'finite' if finite else 'non-finite'} weights."
    )
    own = {"scale at the floor": scale, "collapsed": collapsed, "weights finite": finite}
    return Answer(text, {"torch": rows, "mprun": own})


def _torch_scaler(device: torch.device, fused: bool) -> dict:
    weight = torch.ones(64, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler(device.type)
    reached = None
    for count in range(1, OVERFLOWS + 1):
        _amp_step(scaler, optimizer, weight, float("inf"))
        if reached is None and scaler.get_scale() == 0:
            reached = count
    found = _amp_step(scaler, optimizer, weight, 1.0)
    return {
        "optimizer": "SGD fused" if fused else "SGD foreach",
        "overflows until 0": reached,
        "found_inf on a healthy step": found,
        "weights NaN": float(weight.isnan().float().mean()),
        "scale afterwards": scaler.get_scale(),
    }


def _amp_step(scaler, optimizer, weight: Tensor, factor: float) -> float:
    """Take one step of the documented recipe; return whether it found an infinite gradient."""
    optimizer.zero_grad()
    scaler.scale((weight * factor).sum()).backward()
    scaler.step(optimizer)
    # A fused optimizer gets flag and scale as tensors; in both cases the flag is kept until update.
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    found = max(float(flag) for flag in flags.values())
    scaler.update()
    return found


def _mprun_scale(device: torch.device) -> tuple[float, bool, bool]:
    model, scale = nn.Linear(8, 8, bias=False, device=device), DynamicLossScale(device=device)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = prepare(model, plain, "amp", scaler=scale)
    inputs = torch.eye(8, device=device)
    at_floor = collapsed = None
    for factor in [float("inf")] * OVERFLOWS + [1.0]:
        if factor == 1.0:
            at_floor, collapsed = float(scale.scale), bool(scale.collapsed())
        optimizer.zero_grad()
        (model(inputs) * factor).sum().backward()
        optimizer.step()
    return at_floor, collapsed, bool(model.weight.isfinite().all())


def batch_norm_after_skip(device: torch.device) -> Answer:
    """Find out whether BatchNorm's running statistics are finite after a skipped update."""
    found = {"torch.amp": _torch_batch_norm(device), "mprun": _mprun_batch_norm(device)}
    text = "After one skipped step "
    text += "; ".join(
        f"{name}: {row['statistics not finite']} of {row['statistics']} running statistics not "
        f"finite, {row['evaluation NaN']:.0%} of the evaluation NaN (weights moved: "
        f"{row['weights moved']})"
        for name, row in found.items()
    )
    return Answer(text + ".", found)


def _network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    return nn.Sequential(*layers).to(device)


def _batches(device: torch.device) -> list[Tensor]:
    """Train on a healthy batch, then on one beyond FP16's range."""
    healthy = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    return [healthy, healthy * 1e6]


def _torch_batch_norm(device: torch.device) -> dict:
    model, batches = _network(device), _batches(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    # The emulation on a CPU; nothing on CUDA.
    forward_context = ForwardContext(get_policy("amp"), device)
    before: list[Tensor] = []
    for images in batches:
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with forward_context:
            with torch.autocast(device.type, dtype=torch.float16):
                outputs = model(images)
            scaler.scale(outputs.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return _state(model, before, batches[0])


def _mprun_batch_norm(device: torch.device) -> dict:
    model, batches = _network(device), _batches(device)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    scale = DynamicLossScale(1024.0, device=device)
    model, optimizer = prepare(model, plain, "amp", scaler=scale)
    before: list[Tensor] = []
    for images in batches:
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
    return _state(model, before, batches[0])


def _state(model: nn.Sequential, before: list[Tensor], images: Tensor) -> dict:
    after = list(model.parameters())
    statistics = torch.cat([model[1].running_mean, model[1].running_var])
    with torch.no_grad():
        outputs = model.eval()(images)
    return {
        "weights moved": not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "statistics": statistics.numel(),
        "statistics not finite": int((~statistics.isfinite()).sum()),
        "evaluation NaN": float(outputs.isnan().float().mean()),
    }


def fused_sgd_half(device: torch.device) -> Answer:
    """Find out whether SGD(fused=True) updates half parameters on a CPU (pytorch issue 191763)."""
    counts = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for size in (4, 64, 70):
            weight = torch.ones(size, dtype=dtype, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
            weight.sum().backward()
            optimizer.step()
            counts[f"{dtype} {size}"] = int((weight == 0.5).sum())
    lost = [name for name, moved in counts.items() if moved != int(name.split()[-1])]
    text = (
        f"Yes, the trap is there in torch {torch.__version__}: elements updated "
        + ", ".join(f"{counts[name]} of {name.split()[-1]} ({name.split()[0]})" for name in lost)
        if lost
        else f"Every element is updated in torch {torch.__version__}: the trap is gone"
    )
    return Answer(text + ".", {"elements updated": counts})


def linear_cross_entropy(device: torch.device) -> Answer:
    """Find out whether F.linear_cross_entropy exists and is right."""
    if not hasattr(F, "linear_cross_entropy"):
        return Answer(f"No, torch {torch.__version__} lacks it.", {"there": False})
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=generator).to(device) for n in (16, 100))
    labels = torch.randint(100, (16,), generator=generator).to(device)
    found = F.linear_cross_entropy(x, weight, labels)
    exact = F.cross_entropy(x.double() @ weight.double().T, labels)
    error = float((found - exact).abs() / exact)
    text = f"Yes, in torch {torch.__version__}; relative error against float64 {error:.1e}."
    return Answer(text, {"there": True, "relative error": error})
