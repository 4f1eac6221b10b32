"""What the adapters add to the tables of the core's tests."""

TRAINERS = ["lightning", "pytorch_lightning", "transformers"]
