"""From the records of finished runs to a verdict per precision mode; imports no torch.

command -> load (metrics.jsonl, run.json) or foreign (TensorBoard, CSV) -> grouping (which runs
belong together, which are baselines) -> verdict (divergence, equivalence, looks) -> text, report,
TensorBoard summary runs. `findings` holds the plain data that travels between them.
"""
