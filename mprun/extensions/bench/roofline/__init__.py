"""FLOPs and bytes of a training step, counted without a GPU, and the least time they take."""

# Format of products by dtype. Both FP8 formats run at one rate (NVIDIA H100 data sheet).
FORMATS = {"torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32"}
FORMATS |= dict.fromkeys(("torch.float8_e4m3fn", "torch.float8_e5m2"), "fp8")
