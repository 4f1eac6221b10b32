"""Executing training steps: eagerly, through compiled networks, or as a replayed CUDA graph.

None of these changes what a step computes. A replay runs the kernels of the eager step on the same
addresses and gives the same bits. Compiled networks and the channels-last layout choose other
kernels, which round differently. Every step goes through one `StepRunner`.
"""
