"""The context in which a mode's forward and backward passes run on one device."""

from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext

import torch

from mprun.precision.policy import DTYPE_NAMES, PrecisionPolicy


class Arithmetic:
    """Autocast and CPU emulation of one policy, entered once per training step.

        with arithmetic:                      # forward AND backward
            with arithmetic.autocast():       # forward only
                outputs = model(inputs)
            ...backward...

    On a CPU 16-bit formats are emulated (float16 or bfloat16 tensors, FP32 products rounded once
    on store, as a Tensor Core does; paper section 3.3) unless `native`; on CUDA nothing is.
    overrides: the dtypes of the policy's module overrides; their 16-bit ones are emulated too.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        device: torch.device,
        *,
        native: bool = False,
        overrides: Iterable[torch.dtype] = (),
    ):
        self.policy, self.device = policy, device
        wanted = [dtype for dtype in (policy.half_dtype, *overrides) if dtype is not None]
        self.half_dtypes = tuple(dict.fromkeys(d for d in wanted if d.itemsize == 2))
        self.emulations: tuple = ()
        if self.half_dtypes and device.type == "cpu" and not native:
            from mprun.precision.emulation import HalfEmulation

            self.emulations = tuple(HalfEmulation(dtype) for dtype in self.half_dtypes)

    def __enter__(self) -> "Arithmetic":
        for emulation in self.emulations:
            emulation.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        for emulation in reversed(self.emulations):
            emulation.__exit__(*exception)

    def autocast(self):
        """A fresh autocast block for one forward pass, or a no-op."""
        if self.policy.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.policy.autocast_dtype)

    def rerouted(self) -> dict[str, int]:
        """Calls computed by the emulation so far, by "phase operation"; empty if none."""
        total = sum((emulation.rerouted for emulation in self.emulations), Counter())
        return {f"{phase} {operation}": n for (operation, phase), n in sorted(total.items())}

    def kind(self) -> str:
        """How 16-bit products are computed: "emulated-fp16", "native-bf16", ... or "none"."""
        how = "emulated" if self.emulations else "native"
        return " ".join(f"{how}-{DTYPE_NAMES[d]}" for d in self.half_dtypes) or "none"
