"""A campaign of faults: how a run reacts when something breaks, or when someone breaks in.

Every case runs mprun's command line on a copy of a small run. It is judged by the output and by the
files on the disk afterwards, see `Finding`. It is not part of the tests: it takes an hour and a
half beside other work. Its results are in docs/results/2026-11-22-faults.md, those of the stops at
boundaries in docs/results/2026-11-29-cpu-stops.md.
"""
