"""`mprun.extensions.adapters.lightning` for the library imported as `pytorch_lightning`."""

from mprun.errors import needing
from mprun.extensions.adapters.lightning_parts import PrecisionPart, RunPart

with needing("pytorch-lightning"):
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.plugins import Precision


class MprunPrecision(PrecisionPart, Precision):
    __doc__ = PrecisionPart.__doc__


class MprunRun(RunPart, Callback):
    __doc__ = RunPart.__doc__
