"""``python -m bagpipe.train``, also under torchrun: the training program, from a wheel as from a checkout."""

from bagpipe.cli.programs import run_command

if __name__ == "__main__":  # processes that it spawns import this module
    run_command("train")
