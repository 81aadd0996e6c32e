from tests.harness.soak.cli import main

main()
