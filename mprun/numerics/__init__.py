"""Study the numbers of a run; reading its files (`probe_record`, `post_mortem`) needs no torch."""
