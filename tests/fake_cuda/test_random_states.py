"""Random states on CUDA go back to where they were without a wait, cuDNN's dropout among them."""

from .cells import MODELS

STACKED = MODELS["lstm_lm, 2 layers, dropout"]
BUILT = f"""
from mprun.config.compose import compose_config
from mprun.precision.random_states import random_states, restore_random_states
from mprun.training.run import prepare
overrides = {[*STACKED, "precision=amp", "train.cuda_graph=off"]!r}
device = torch.device("cuda", 0)
built = prepare(compose_config([*overrides, "device=cuda"]).config, device, 1)
offset = lambda: torch.cuda.default_generators[0].get_offset()
def step(index):
    before = offset()
    built.task.train_step(index)
    return offset() - before
"""


def test_going_back_waits_for_nothing_and_draws_nothing(script):
    found = script(f"""{BUILT}
used = [step(0), step(1)]
states = random_states(device)
torch.cuda.set_sync_debug_mode("error")
restore_random_states(states, device)
used.append(step(2))
return {{"used": used}}
""")
    # torch's own layer would seed its state anew, which takes 4 more from the generator.
    assert len(set(found["used"])) == 1


def test_what_goes_back_is_what_was_there(script):
    """The state is a tensor that is saved, overwritten in place, and seeded with the run."""
    found = script(f"""{BUILT}
from mprun.precision.random_states import _dropout_states
step(0)
[state] = _dropout_states.values()
state.fill_(0), state[:3].copy_(torch.tensor([1, 2, 3], dtype=torch.uint8))
saved, address = random_states(device), state.data_ptr()
state[:3].copy_(torch.tensor([7, 7, 7], dtype=torch.uint8))
restore_random_states(saved, device)
[again] = _dropout_states.values()
return {{"values": again[:3].tolist(), "same": again.data_ptr() == address}}
""")
    assert found["values"] == [1, 2, 3] and found["same"]


def test_a_shadow_step_leaves_the_generators_alone(script):
    found = script(f"""{BUILT}
from mprun.numerics.probe import chosen_modules
from mprun.numerics.probing import Shadow
step(0)
used = step(1)
before = offset()
with Shadow(built.task, chosen_modules(built.task.learners, [])) as shadow:
    metrics = built.task.train_step(2, measure=True)
shadow.run(2, metrics)
taken = offset() - before
torch.cuda.set_sync_debug_mode("error")
return {{"used": [used, taken, step(3)]}}
""")
    assert len(set(found["used"])) == 1
