from cacher.cli import main

main()
