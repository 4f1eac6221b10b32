"""The ways a run can end that are not a bug, each with its exit code.

Exit codes: 0 done, 1 a bug in mprun, 2 bad input, 3 diverged, 4 damaged data or checkpoint,
5 resource (disk, memory, lost worker), 75 preempted and resumable, 130 interrupted.
"""

DONE, BUG, BAD_INPUT, DIVERGED, DAMAGED, RESOURCE, PREEMPTED, INTERRUPTED = (
    0,
    1,
    2,
    3,
    4,
    5,
    75,
    130,
)

STATUS_EXIT_CODE = {
    "done": DONE,
    "failed": BUG,
    "diverged": DIVERGED,
    "preempted": PREEMPTED,
}


class MprunError(Exception):
    """Base of the errors that end with one line on stderr and an exit code of their own."""

    exit_code = BUG


class BadInput(MprunError):
    """What the user asked for cannot be done; the message names key, value and what is allowed."""

    exit_code = BAD_INPUT


class Damaged(MprunError):
    """A file that should be whole is not: a checkpoint, a record or a data file."""

    exit_code = DAMAGED


class Resource(MprunError):
    """The machine ran out of something: disk, memory, a worker process."""

    exit_code = RESOURCE
