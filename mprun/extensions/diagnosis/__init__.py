"""Why a run diverged, and what would have cured it: advise, explain, logprobs."""
