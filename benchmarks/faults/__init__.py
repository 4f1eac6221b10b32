"""A campaign of faults: what becomes of a run when something breaks, or when someone breaks in.

Every case runs mprun's own command line on a copy of a small run and is judged by what a user would
see and by what is on the disk afterwards, see `Finding`. Not part of the tests: it takes an hour
and a half beside other work. docs/results/2026-11-22-faults.md has what it found.
"""
