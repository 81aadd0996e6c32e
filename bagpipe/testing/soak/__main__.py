from bagpipe.testing.soak.cli import main

main()
