"""The command line `python -m bagpipe`: schedules and plans, printed.

main: the table of commands; schedule, plan: one command each.
"""
