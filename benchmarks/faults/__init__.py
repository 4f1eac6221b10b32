"""A campaign of faults: what becomes of a run when something breaks, or when someone breaks in.

Every case runs mprun's own command line on a copy of a small run and is judged by what a user would
see and by what is on the disk afterwards, see `Finding`. Not part of the tests: it takes about an
hour on 2 cores. `python -m benchmarks.faults OUT` writes the page that docs/results holds.
"""
