"""Diagnosis adds these rows to the tables of the core's tests."""

COMPLETIONS = [
    ("mprun explain data.batch", []),
    ("mprun logprobs fp32 fp8_r", ["fp8_rowwise"]),
    ("mprun logprobs fp32 data.batch", ["data.batch_size="]),
    ("mprun logprobs outputs/", []),  # files
]
BAD_LINES = [("explain " + "a" * 5000, "File name too long: aaa")]
# Verbs that read a run, each behind its words.
READERS = [["explain"]]
# Of the folder "run", which names code.
RUNS_CODE = [
    ["explain", "run"],
    ["explain", "run", "--no-cures"],
    ["advise", "run"],
    ["advise", "run", "--check"],
    ["logprobs", "amp", "run"],
]
# Of a run whose code an option file names.
OF_A_RUN = [["advise"]]
