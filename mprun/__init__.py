"""mprun: what lower precision does to a training run, compared with FP32."""

__version__ = "0.1.0"
