"""The bench adds these rows to the tables of the core's tests."""

HELP_PAGES = ["bench --roofline"]
COMPLETIONS = [
    ("mprun bench --roofline --t", ["--top"]),
    ("mprun bench --modes fp32,tf", ["fp32,tf32"]),
    ("mprun bench data.batch", ["data.batch_size="]),
]
NEED_CLI = ["bench"]
