"""Lightning in a precision mode: `Trainer(plugins=[MprunPrecision("amp")])`.

For the library imported as `lightning`; `mprun.adapters.pytorch_lightning` is the other name.
"""

from mprun.adapters.lightning_parts import PrecisionPart, RunPart
from mprun.errors import needing

with needing("lightning"):
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins import Precision


class MprunPrecision(PrecisionPart, Precision):
    __doc__ = PrecisionPart.__doc__


class MprunRun(RunPart, Callback):
    __doc__ = RunPart.__doc__
