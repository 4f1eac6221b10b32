"""A pytest plugin: one JSON line as each test starts and one as it ends.

pytest writes its reports at the very end; a run that is killed, or that crashes with a CUDA error,
would leave none.
"""

import json


def pytest_addoption(parser):
    parser.addoption("--tests-log", metavar="FILE")


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # of pytest-xdist, whose first process is told of all tests
        return
    config.pluginmanager.register(TestsLog(config.getoption("--tests-log")))


class TestsLog:
    """A writer of lines: {"test", "started"}, then {"test", "outcome", "seconds", "message"}."""

    def __init__(self, path: str):
        self._file = open(path, "w", encoding="utf-8", buffering=1)
        self._ended: dict[str, dict] = {}  # of the tests under way

    def pytest_collectreport(self, report):
        if report.failed:
            self._write(test=report.nodeid, **_failure(report))

    def pytest_runtest_logstart(self, nodeid):
        self._ended[nodeid] = {"outcome": "passed", "seconds": 0.0}
        self._write(test=nodeid, started=True)

    def pytest_runtest_logreport(self, report):
        # A worker that died has said nothing of its test but that it failed.
        ended = self._ended.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        ended["seconds"] += report.duration
        if report.failed:
            ended |= _failure(report)
        elif report.skipped and ended["outcome"] == "passed":
            ended["outcome"] = "skipped"

    def pytest_runtest_logfinish(self, nodeid):
        self._write(test=nodeid, **self._ended.pop(nodeid))

    def pytest_unconfigure(self):
        self._file.close()

    def _write(self, **line):
        self._file.write(json.dumps(line) + "\n")


def _failure(report) -> dict:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines()
    # The first line of an exception; the last line of a traceback in plain text.
    return {"outcome": "failed", "message": (lines or [""])[0 if crash else -1]}
