"""The whole paper: its tables and figures beside our runs (`mprun paper`).

`rows` lists the runs for each result, `outcomes` reads their outcomes, `page` writes the page.
"""
