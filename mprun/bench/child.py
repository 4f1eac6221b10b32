"""One contender in a process of its own: does what its parent asks, one JSON line each way.

`python -m mprun.bench.child PARENT_ID`. A request is {"do": NAME, ...}; the answer is {"ok": true,
...} or {"ok": false, "kind": "memory" | "refused" | "error", "reason": ONE_LINE}. Only the child
that was asked works; the others wait for a line and leave the device alone.
"""

import json
import os
import sys
import traceback

from mprun.errors import PREEMPTED, BadInput, Resource, raised
from mprun.training.signals import end_with_parent


def main(arguments: list[str]) -> int:
    """Answer requests until "end" or the end of the input."""
    if not end_with_parent(int(arguments[0])):
        return PREEMPTED
    # Whatever a library prints belongs into the log: stdout is the protocol alone.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from mprun.bench.worker import Worker

    worker = Worker()
    _send(answers, {"ok": True})  # imports are done
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        if name == "end":
            break
        try:
            answer = {"ok": True, **worker.ask(name, request)}
        except Exception as error:  # any failure of a contender is a row of the report
            traceback.print_exc()
            answer = {"ok": False, **failure(error)}
        _send(answers, answer)
    return 0


def failure(error: Exception) -> dict:
    """kind and one-line reason of a failure."""
    import torch

    line = str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError | Resource):
        return {"kind": "memory", "reason": f"out of memory: {line}"}
    if "DefaultCPUAllocator" in line:
        return {"kind": "memory", "reason": f"out of memory: {line}"}
    if isinstance(error, BadInput):
        return {"kind": "refused", "reason": line}
    return {"kind": "error", "reason": raised(error)}


def _send(answers, answer: dict) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
