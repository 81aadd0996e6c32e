from tests.harness.same_bits.cli import main

main()
