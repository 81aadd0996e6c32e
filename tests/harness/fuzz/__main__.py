from tests.harness.fuzz.cli import main

main()
