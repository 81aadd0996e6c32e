from tests.harness.chaos.cli import main

main()
