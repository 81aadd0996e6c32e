"""The command line `python -m bagpipe`: schedules and plans, printed."""
