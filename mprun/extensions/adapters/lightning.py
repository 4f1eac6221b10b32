"""Lightning in a precision mode: `Trainer(plugins=[MprunPrecision("amp")])`.

For the library imported as `lightning`; `adapters.pytorch_lightning` is for the other name.
"""

from mprun.errors import needing
from mprun.extensions.adapters.lightning_parts import PrecisionPart, RunPart

with needing("lightning"):
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins import Precision


class MprunPrecision(PrecisionPart, Precision):
    __doc__ = PrecisionPart.__doc__


class MprunRun(RunPart, Callback):
    __doc__ = RunPart.__doc__
