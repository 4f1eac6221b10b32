"""The arithmetic of a mode on a device: autocast, and the emulation of 16 bits on a CPU.

A mode that a device cannot honour is refused, never replaced.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mprun.precision.autocast import cuda_lists
from mprun.precision.emulated_operations import PRODUCTS
from mprun.precision.emulation import HalfEmulation
from mprun.precision.policy import DTYPE_NAMES, PrecisionPolicy
from mprun.precision.recurrent import own_recurrent
from mprun.precision.scaled_attention import InScaledAttention
from mprun.precision.scaled_operators import Calls
from mprun.precision.scaled_products import why_decoded, why_no_product
from mprun.torch_private import TorchDispatchMode, dispatch_modes, function_modes


class ForwardContext:
    """A context with the autocast and the CPU emulation of one policy.

    A prepared model enters this context in its forward and backward passes:

        with forward_context:                 # forward AND backward
            with forward_context.autocast():  # forward only
                outputs = model(inputs)
            ...backward...

    The context may be entered again inside itself without effect, so each part of a step may enter
    it.

    On a CPU, 16-bit formats are emulated, and autocast follows CUDA's operation lists. On CUDA the
    context changes nothing.

    Args:
        native: whether a CPU runs torch's own 16-bit kernels, without emulation. With native
            kernels, autocast follows torch's operation lists for a CPU.
        overrides: the dtypes of the policy's module overrides; 16-bit overrides are also
            emulated.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        device: torch.device,
        *,
        native: bool = False,
        overrides: Iterable[torch.dtype] = (),
    ):
        self.policy, self.device, self.native = policy, device, native
        overrides = [*overrides]
        self.overridden = bool(overrides)
        wanted = [dtype for dtype in (policy.half_dtype, *overrides) if dtype is not None]
        self.calls = Calls()
        self.unmet: dict[str, float] = {}  # see `scaled_linear.install`
        self.earlier: Mapping[str, int] = {}  # `rerouted` of the run's earlier attempts
        self.half_dtypes = tuple(dict.fromkeys(d for d in wanted if d.itemsize == 2))
        emulated = self.half_dtypes if device.type == "cpu" and not native else ()
        self.emulations = tuple(HalfEmulation(dtype) for dtype in emulated)
        follows = self.emulations and policy.autocast_dtype is not None
        self._lists = cuda_lists() if follows else None  # for as long as this lives
        functions = [emulation.functions for emulation in self.emulations]
        self._functions: list[TorchFunctionMode] = [*functions]
        if policy.attention is not None and policy.half_dtype is not None:
            own = InScaledAttention(policy.attention, policy.half_dtype, self.calls)
            self._functions.append(own)
        self._entered: list[ExitStack] = []
        # Entered after the emulations, so that they see an operation before them.
        self.watchers: list[TorchDispatchMode] = []

    def __enter__(self) -> Self:
        # A mode entered twice would see each call twice. Function modes are checked separately:
        # a backward pass keeps the dispatch modes around it and loses the function modes.
        entered = ExitStack()
        for mode in (*self.emulations, *self.watchers):
            if mode not in dispatch_modes():
                entered.enter_context(mode)
        for functions in self._functions:
            if functions not in function_modes():
                entered.enter_context(functions)
        self._entered.append(entered)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a new `torch.autocast` block for one forward pass, or an empty context if the mode
        has none."""
        if self.policy.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.policy.autocast_dtype)

    def rerouted(self) -> dict[str, int]:
        """Return how many calls the emulation has computed so far, by phase and operation.

        A product of scaled operands is named by their formats, as in "forward e4m3 x e4m3".
        """
        total = sum((emulation.rerouted for emulation in self.emulations), Counter())
        found = Counter(self.earlier)
        for (operation, phase), count in sorted(total.items()):
            found[f"{phase} {operation}"] += count
        found.update(dict(sorted(self.calls.items())))
        return dict(found)

    def counted(self) -> Callable[[], None]:
        """Save all counts of calls, and return a function that restores the saved counts."""
        counters: list[Counter[Any]] = [self.calls, *(one.rerouted for one in self.emulations)]
        kept = [(counter, dict(counter)) for counter in counters]

        def set_back() -> None:
            for counter, before in kept:
                counter.clear()
                counter.update(before)

        return set_back

    def recurrent_layers(self) -> Counter[tuple[str, torch.dtype]]:
        """Count, for each phase and dtype, the recurrent layers that the emulation computed in one
        operation. A `TorchDispatchMode` does not see the operations inside these layers."""
        found: Counter[tuple[str, torch.dtype]] = Counter()
        for emulation in self.emulations:
            for (operation, phase), count in emulation.rerouted.items():
                if operation.removesuffix("_") not in PRODUCTS:
                    found[phase, emulation.dtype] += count
        return found

    def kind(self) -> str:
        """Return how products in 16 or fewer bits are computed: "emulated-fp16", "native-bf16",
        ..., "none".

        "decoded-e2m1" means that CUDA decodes numbers in E2M1 before it multiplies; see
        `how_multiplied`.
        """
        how = "emulated" if self.emulations else "native"
        found = [f"{how}-{DTYPE_NAMES[dtype]}" for dtype in self.half_dtypes]
        return " ".join([*found, *self._of_products(), *self._of_attention()]) or "none"

    def _of_products(self) -> list[str]:
        if (products := self.policy.matmul) is None:
            return []
        on_cuda = "native" if why_decoded(products, self.device) is None else "decoded"
        how = "emulated" if self.device.type == "cpu" else on_cuda
        return [f"{how}-{element.name}" for element in products.formats]

    def _of_attention(self) -> list[str]:
        how = self.policy.attention
        return [] if how is None else [f"emulated-{name}" for name in dict.fromkeys(how.names)]

    def missing(self) -> str | None:
        """Return the part of the mode that has not run so far, such as "emulated-fp16", or None if
        no part is known to be missing."""
        ran = self.rerouted()
        scaled = [" x " in name for name in ran]
        attended = [name.endswith("-attention") for name in ran]
        of_attention = self._of_attention()
        if self.policy.matmul is not None and not any(scaled):
            return " ".join(self._of_products())
        if of_attention and not any(attended):
            return " ".join(of_attention)
        narrow = all(map(operator.or_, scaled, attended))
        return None if not self.emulations or not narrow else self.kind()


def why_unsupported(
    policy: PrecisionPolicy, device: torch.device, overrides: Iterable[torch.dtype] = ()
) -> str | None:
    """Return the reason why `device` cannot run `policy` as defined, or None if it can.

    TF32 and BF16 Tensor Cores exist from compute capability 8.0 on (NVIDIA Ampere), and FP8 Tensor
    Cores from 8.9 on. For FP8, small test products show whether torch supports this policy on the
    device. If numbers are decoded before a matrix product, the GPU multiplies them in BF16. The
    limits on compute capability do not apply to GPUs with ROCm. A GPU with ROCm has no TF32; for
    other formats, only the small test products show whether the GPU supports them.

    overrides: the dtypes in the policy's module overrides.
    """
    if device.type == "cpu":
        if policy.fp32_math == "tf32":
            return "a CPU has no TF32; use precision=fp32, or device=cuda on a machine with a GPU"
        return None
    products = policy.matmul
    multiplied = () if products is None else products.multiplied
    in_bf16 = torch.bfloat16 in (policy.half_dtype, *multiplied, *overrides)
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        if policy.fp32_math == "tf32":
            return f"{name} (ROCm) has no TF32; use precision=fp32"
    else:
        for needed, least, what in (
            (policy.fp32_math == "tf32", (8, 0), "TF32"),
            (products is not None and not products.decoded, (8, 9), "FP8 products"),
            (in_bf16, (8, 0), "bfloat16 products"),
        ):
            if needed and (own := torch.cuda.get_device_capability(device)) < least:
                number, first = (".".join(map(str, one)) for one in (own, least))
                own_name = f"{name} (compute capability {number})"
                return f"{own_name} has no {what}; compute capability {first} or later has it"
    if products is not None and (why := why_no_product(products, device)):
        return f"{name} refuses a small product of precision={policy.name}: {why}"
    return None


def why_no_lstm(
    policy: PrecisionPolicy, device: torch.device, projected: bool = False
) -> str | None:
    """Return why torch's LSTM on `device` does not compute in the policy's dtype, or None.

    The function runs a tiny LSTM to find out whether torch computes it in the policy's dtype. One
    known case is a CPU, which has no float16 LSTM under autocast.
    """
    wanted = policy.half_dtype
    if wanted is None:
        return None
    with torch.random.fork_rng(devices=[]):  # the random state belongs to the model
        lstm = nn.LSTM(8, 8, proj_size=4 if projected else 0).to(device, policy.param_dtype)
    own_recurrent(lstm)
    inputs = torch.zeros(2, 8, 8, device=device, dtype=policy.param_dtype)
    autocast = policy.autocast_dtype is not None
    try:
        with torch.autocast(device.type, dtype=policy.autocast_dtype, enabled=autocast):
            outputs, _ = lstm(inputs)
    except RuntimeError as error:
        return f"torch has no {wanted} LSTM here ({str(error).splitlines()[0]})"
    if outputs.dtype is not wanted:
        return f"torch computes the LSTM in {outputs.dtype} here, not in {wanted}"
    return None
