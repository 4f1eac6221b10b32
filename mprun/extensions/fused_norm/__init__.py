"""BatchNorm, the sum of a residual and ReLU as one Triton kernel each way: train.fused_norm."""
