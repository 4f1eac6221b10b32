"""The whole paper: its tables and figures beside runs of our own (`mprun paper`).

`rows` says what is run for which result, `outcomes` reads what came of it, `page` writes it down.
"""
