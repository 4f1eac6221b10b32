"""One run on several processes: finding, starting and synchronizing its ranks.

A run with one rank never imports torch.distributed.
"""
