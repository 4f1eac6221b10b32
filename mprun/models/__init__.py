"""The networks, as plain modules that never mention a dtype.

Each works in whatever dtype its parameters and inputs have, and under autocast; the precision
policy decides on the dtype.
"""
