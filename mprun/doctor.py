"""`mprun doctor`: what this machine is, and what each precision mode means on it."""

from mprun.errors import DONE, BadInput


def main(arguments: list[str]) -> int:
    """Print devices, versions, numeric flags and the modes that can run; always exit code 0."""
    if arguments in (["-h"], ["--help"]):
        print(f"usage: mprun doctor\n\n{__doc__}")
        return DONE
    if arguments:
        raise BadInput(f"doctor {arguments[0]}: takes no arguments")

    import torch

    from mprun.precision import MODES, Arithmetic, get_policy, pin_math_flags, why_unsupported
    from mprun.record.environment import environment, flags

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pin_math_flags("ieee")
    facts = environment(device)
    print(f"device       {facts.get('gpu', 'no GPU that torch can use')}")
    if device.type == "cuda":
        print(
            f"CUDA         {facts['cuda']}, cuDNN {facts['cudnn']}, compute capability "
            f"{facts['compute_capability']}"
        )
    print(f"CPU          {facts['cpu']}, {facts['cpu_count']} cores, {facts['threads']} threads")
    versions = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    print(f"versions     python {facts['python']}, {versions}")
    print(
        f"mprun        {facts['mprun']}, commit {facts['commit']}"
        f"{' with local changes' if facts['dirty'] else ''}"
    )
    print("\nmode                 on this machine")
    for name in MODES:
        policy = get_policy(name)
        reason = why_unsupported(policy, device)
        if reason is None:
            kind = Arithmetic(policy, device).kind()
            reason = "FP32 products" if kind == "none" else f"{kind} products"
            if policy.fp32_math == "tf32":
                reason = "TF32 products"
        else:
            reason = f"refused: {reason}"
        print(f"{name:<20} {reason}")
    print("\nflags that a run pins (here: fp32)")
    for name, value in flags().items():
        print(f"  {name} = {value}")
    return DONE
