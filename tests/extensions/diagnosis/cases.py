"""What diagnosis adds to the tables of the core's tests."""

COMPLETIONS = [
    ("mprun explain data.batch", []),
    ("mprun mismatch fp32 fp8_r", ["fp8_rowwise"]),
    ("mprun mismatch fp32 data.batch", ["data.batch_size="]),
    ("mprun mismatch outputs/", []),  # files
]
BAD_LINES = [("explain " + "a" * 5000, "File name too long: aaa")]
# Verbs that read a run, each behind its words; where they may write, to "out".
READERS = [["explain"], ["scaler-replay", "--out", "out"]]
# Of the folder "run", which names code.
RUNS_CODE = [
    ["explain", "run"],
    ["explain", "run", "--no-cures"],
    ["advise", "run"],
    ["advise", "run", "--check"],
    ["mismatch", "amp", "run"],
]
# Of the folder "run", whose code stays where it is; and of a run whose code an option file names.
RUNS_NO_CODE = [["scaler-replay", "run"]]
OF_A_RUN = [["advise"]]
