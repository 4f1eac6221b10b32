"""One run on several processes: who they are, how they are started, what they agree on.

Nothing here imports torch.distributed where a run has one rank.
"""
