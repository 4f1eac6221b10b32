"""What happens to the numbers of a run: exponents, lost updates, shadow steps, records of them.

Imported only where it is asked for; reading the files of a run (`probe_record`) needs no torch.
"""
