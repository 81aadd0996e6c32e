from tests.harness.histories.cli import main

main()
