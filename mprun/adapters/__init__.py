"""Trainers of other libraries in a precision mode; each module needs its extra.

mprun.adapters.lightning          Lightning, as `import lightning`
mprun.adapters.pytorch_lightning  the same, as `import pytorch_lightning`
mprun.adapters.transformers       Trainer of Hugging Face transformers
"""
