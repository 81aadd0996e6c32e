from bagpipe.testing.chaos.cli import main

main()
