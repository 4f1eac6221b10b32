"""A bench child that speaks the protocol and does what the case's `extra` says, without torch.

memory_at, error_at, exit_at, hang_at: the request that goes wrong. alone: it finds memory only if
no other child with `alone` is alive (a lock file). Every request is noted in the file `trace`.
"""

import os
import time
from pathlib import Path


class Scripted:
    """Answers every request by its name."""

    def __init__(self):
        self.extra, self.name = {}, ""

    def __getattr__(self, what):
        def answered(**request):
            if what == "build":
                self.extra, self.name = request["case"].extra, request["case"].contender
            with open(self.extra["trace"], "a", encoding="utf-8") as file:
                file.write(f"{what} {self.name}\n")
            return answer(what, self.extra)

        return answered


def answer(what: str, extra: dict) -> dict:
    if extra.get("exit_at") == what:
        os._exit(7)
    if extra.get("hang_at") == what:
        time.sleep(60)
    if extra.get("error_at") == what:
        raise ValueError("as told")
    if what == "build" and "room" in extra:
        # As many as `room` children fit; each leaves a file while it lives.
        folder = Path(extra["room_folder"])
        (folder / str(os.getpid())).touch()
        alive = [pid for pid in os.listdir(folder) if Path(f"/proc/{pid}").exists()]
        if len(alive) > extra["room"]:
            raise MemoryError("as told")
    losses = [extra.get("loss", 1.0)] * 20
    memory, steady = {"free": 1000, "held": 1}, {"steady": True, "apart": 0.01}
    answers = {
        "build": {"samples_per_step": 10, "sample": "image", "threads": 1},
        "first_steps": {"losses": losses, "skipped": 0, "seconds": [0.01] * 20},
        "prepare": {"settings": {}, "flags": {}, "first_use_s": 0.5, "replays": False, **memory},
        "warm_up": {"steps_per_window": 3, "step_s": 0.01, "steps": 9, "seconds": 0.1, **steady},
        "window": {
            "steps": 3,
            "samples": 30,
            "seconds": 30 / extra.get("rate", 100),
            "wall_s": 0.03,
            "cpu_s": 0.03,
            "energy_mj": None,
            "sensors": {},
            "data_wait_s": None,
            "loss_is_finite": True,
        },
        "details": {"skipped": 0, "peak": {"resident": 2**20}, "host_s": 0.01, "nvml": {}},
    }
    return answers[what]
