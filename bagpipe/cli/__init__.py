"""The command line `bagpipe`, or `python -m bagpipe`: schedules, plans and forecasts, printed; and the programs.

main: the table of commands; schedule, plan, calibrate, sweep, jigsaw: one command each; programs: train, eval, predict,
export, apply, cacher, data; progress: the steps done of a long command; text: files and tables of the commands;
sweep_file: the file with which a sweep goes on.
"""
