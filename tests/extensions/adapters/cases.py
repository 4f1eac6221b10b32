"""The adapters add these rows to the tables of the core's tests."""

TRAINERS = ["lightning", "pytorch_lightning", "transformers"]
