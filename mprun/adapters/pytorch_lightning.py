"""`mprun.adapters.lightning` for the library imported as `pytorch_lightning`."""

from mprun.adapters.lightning_parts import PrecisionPart, RunPart
from mprun.errors import needing

with needing("pytorch-lightning"):
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.plugins import Precision


class MprunPrecision(PrecisionPart, Precision):
    __doc__ = PrecisionPart.__doc__


class MprunRun(RunPart, Callback):
    __doc__ = RunPart.__doc__
