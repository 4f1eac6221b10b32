"""The whole paper: its tables and figures beside our runs (`mprun paper`).

`rows` has its results and the runs for each, `outcomes` reads their outcomes, `page` writes the
page.
"""
