from bagpipe.cli.programs import run_command

run_command("train")
