"""Precision modes for the trainers of other libraries; each module needs its extra.

mprun.extensions.adapters.lightning          Lightning, as `import lightning`
mprun.extensions.adapters.pytorch_lightning  the same, as `import pytorch_lightning`
mprun.extensions.adapters.transformers       Trainer of Hugging Face transformers
"""
