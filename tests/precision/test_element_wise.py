"""Element-wise operations in 16 bits: the FP32 operation rounded once, on every number there is."""

import pytest
import torch
from torch.nn import functional as F

from mprun.precision.emulation import HalfEmulation
from mprun.torch_private import operator_names, schema_of

from .emulated import half

# Numbers that the formats do not hold: rounded, below and beyond their range.
NUMBERS = (0.3, -0.7, 1 / 3, 1e-8, 1e-3, 2.5, 1e5, -3e38)
ROUNDED = "CUDA's kernel rounds the number to the format, as the CPU's does"
# Operations that differ from FP32 rounded once, and why.
BY_DESIGN = {
    "nan_to_num": "infinities become the largest number of the format",
    "nextafter": "the neighbour in the format",
    **dict.fromkeys(("eq", "ge", "gt", "le", "lt", "ne"), ROUNDED),
    **dict.fromkeys(("fmod", "remainder", "hardshrink", "softshrink", "threshold"), ROUNDED),
}


def every(dtype, step=1):
    """All 65,536 numbers of a format, or one in `step`, infinities and NaN among them."""
    return torch.arange(-(2**15), 2**15, step, dtype=torch.int32).to(torch.int16).view(dtype)


def element_wise():
    """Every functional operator of torch that it calls element-wise, with one result."""
    for full in sorted(operator_names()):
        packet, _, overload = full.removeprefix("aten::").partition(".")
        if not full.startswith("aten::") or packet.startswith(("_foreach_", "_fused_")):
            continue
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is None:
            continue
        schema = schema_of(operator)
        is_one = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
        if torch.Tag.pointwise in operator.tags and is_one and not schema.is_mutable:
            yield packet, operator, [(a, str(a.type)) for a in schema.arguments]


def differing(operator, args, kwargs, dtype):
    """How many results differ from FP32 rounded once, or the error of 16 bits alone; None if CUDA
    has no 16-bit kernel, or torch none in FP32, as of a shift."""
    wide = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
    try:
        with HalfEmulation(dtype):
            found = operator(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as refusal:
        if "CUDA has no" in str(refusal):
            return None
        try:
            operator(*wide, **kwargs)
        except (RuntimeError, NotImplementedError):
            return None
        return str(refusal)
    rounded = operator(*wide, **kwargs).to(found.dtype)
    return int(((found != rounded) & ~(found.isnan() & rounded.isnan())).sum())


@pytest.mark.slow
@half
def test_every_function_of_one_number(dtype):
    wrong, checked = {}, 0
    for packet, operator, arguments in element_wise():
        if [kind for a, kind in arguments if not a.has_default_value()] != ["Tensor"]:
            continue
        count = differing(operator, [every(dtype)], {}, dtype)
        checked += count is not None
        if count and packet not in BY_DESIGN:
            wrong[operator.name()] = count
    assert wrong == {} and checked > 60


@pytest.mark.slow
@half
def test_every_number_beside_a_tensor(dtype):
    """With each tensor argument after the first, normal numbers."""
    x = every(dtype, 16)
    wrong, checked = {}, 0
    for packet, operator, arguments in element_wise():
        kinds = {"Tensor", "number", "Optional[number]"}
        taken = [(a, kind) for a, kind in arguments if kind in kinds]
        others = [kind for a, kind in arguments if kind not in kinds and not a.has_default_value()]
        if others or not any("number" in kind for _, kind in taken) or taken[0][1] != "Tensor":
            continue
        for number in NUMBERS:
            args, kwargs = [], {}
            for argument, kind in taken:
                value = number if kind != "Tensor" else torch.randn(len(x)).to(dtype)
                if argument.kwarg_only:
                    kwargs[argument.name] = value
                else:
                    args.append(value)
            args[0] = x
            if packet not in BY_DESIGN:
                count = differing(operator, args, kwargs, dtype)
                checked += count is not None
                if count:
                    wrong[operator.name(), number] = count
    assert wrong == {} and checked > 200


@half
@pytest.mark.parametrize("name", ["asin", "cosh", "erf", "gelu", "sin", "sinh", "sqrt", "tanh"])
def test_functions_of_another_kernel_than_in_fp32(name, dtype):
    """The 16-bit kernel of erf is up to 5 units off in FP16 and 255 in BF16."""
    function = getattr(torch.ops.aten, name).default
    assert differing(function, [every(dtype)], {}, dtype) == 0
    with HalfEmulation(dtype):
        x = every(dtype, 99)
        in_place = getattr(torch.ops.aten, f"{name}_")(x.clone())
        assert torch.equal(function(x).nan_to_num(), in_place.nan_to_num())


@half
@pytest.mark.parametrize("number", NUMBERS)
def test_alpha_is_not_rounded(number, dtype):
    x, y = torch.randn(2, 512).to(dtype).unbind()
    y[0] = 65504.0
    for name, sign in (("add", 1), ("sub", -1), ("rsub", -1)):
        one, other = (y, x) if name == "rsub" else (x, y)
        expected = torch.add(one.float(), other.float(), alpha=sign * number).to(dtype)
        with HalfEmulation(dtype):
            found = [getattr(torch, name)(x, y, alpha=number)]
            if name != "rsub":
                found.append(getattr(x.clone(), f"{name}_")(y, alpha=number))
                found.append(torch.empty_like(x))
                getattr(torch, name)(x, y, alpha=number, out=found[-1])
        for result in found:
            assert torch.equal(result.nan_to_num(7.0), expected.nan_to_num(7.0)), name
    with HalfEmulation(dtype):
        more = x + number
    assert torch.equal(more.nan_to_num(7.0), (x.float() + number).to(dtype).nan_to_num(7.0))


@half
def test_limits_beyond_the_format(dtype):
    """CUDA's kernels take them in FP32; the CPU's refuse what FP16 does not hold."""
    x = every(dtype)
    x = x[~x.isnan()]
    with HalfEmulation(dtype):
        of_one = x.clamp(max=1e5), x.clamp(min=-1e5)
        of_both = F.hardtanh(x, -1e5, 1e5), x.clone().clamp_(-1e5, 1e5)
    assert torch.equal(of_one[0], x.float().clamp(max=1e5).to(dtype))
    assert torch.equal(of_one[1], x.float().clamp(min=-1e5).to(dtype))
    for bounded in of_both:
        assert torch.equal(bounded, x.float().clamp(-1e5, 1e5).to(dtype))
    for function in (F.hardtanh, torch.clamp):
        own = x[: 2**14].clone().requires_grad_()
        with HalfEmulation(dtype):
            function(own, -1e5, 1e5).sum().backward()
        wide = own.detach().float().requires_grad_()
        function(wide, -1e5, 1e5).sum().backward()
        assert torch.equal(own.grad, wide.grad.to(dtype))
