"""From the records of finished runs to a verdict per precision mode; imports no torch.

load (run.json, metrics.jsonl) or log_formats and external_logs (what other tools wrote)
-> grouping (which runs belong together, which are baselines)
-> verdict (divergence, then equivalence)
-> text (console, report.md, results.json), report (report.html and its figures), paper,
   tensorboard_summary.

`findings` holds the plain data that travels between them.
"""
