"""Study the numbers of a run: exponents, lost updates, shadow steps, and records of them.

The package is imported only on demand; reading the files of a run (`probe_record`) needs no torch.
"""
