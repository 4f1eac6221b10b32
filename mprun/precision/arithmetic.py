"""The context in which a mode's forward and backward passes run on one device."""

from contextlib import nullcontext

import torch

from mprun.precision.policy import DTYPE_NAMES, PrecisionPolicy


class Arithmetic:
    """Autocast and CPU emulation of one policy, entered once per training step.

        with arithmetic:                      # forward AND backward
            with arithmetic.autocast():       # forward only
                outputs = model(inputs)
            ...backward...

    On a CPU a 16-bit mode is emulated (float16 or bfloat16 tensors, FP32 products rounded once on
    store, as a Tensor Core does; paper section 3.3) unless `native`; on CUDA nothing is emulated.
    """

    def __init__(self, policy: PrecisionPolicy, device: torch.device, *, native: bool = False):
        self.policy, self.device = policy, device
        self.emulation = None
        if policy.half_dtype is not None and device.type == "cpu" and not native:
            from mprun.precision.emulation import HalfEmulation

            self.emulation = HalfEmulation(policy.half_dtype)

    def __enter__(self) -> "Arithmetic":
        if self.emulation is not None:
            self.emulation.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        if self.emulation is not None:
            self.emulation.__exit__(*exception)

    def autocast(self):
        """A fresh autocast block for one forward pass, or a no-op."""
        if self.policy.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.policy.autocast_dtype)

    def rerouted(self) -> dict[str, int]:
        """Calls computed by the emulation so far, by "phase operation"; empty if none."""
        if self.emulation is None:
            return {}
        counts = sorted(self.emulation.rerouted.items())
        return {f"{phase} {operation}": count for (operation, phase), count in counts}

    def kind(self) -> str:
        """How 16-bit products are computed: "emulated-fp16", "native-bf16", ... or "none"."""
        if self.policy.half_dtype is None:
            return "none"
        how = "native" if self.emulation is None else "emulated"
        return f"{how}-{DTYPE_NAMES[self.policy.half_dtype]}"
