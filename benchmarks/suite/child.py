"""`python -m benchmarks.suite.child PARENT_ID`: a child of a bench that knows the other tools."""

import sys

from mprun.bench.child import serve


def _suite():
    from benchmarks.suite.contest import Suite

    return Suite()


if __name__ == "__main__":
    raise SystemExit(serve(_suite, sys.argv[1:]))
