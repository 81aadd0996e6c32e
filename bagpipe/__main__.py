from bagpipe.cli.main import main

raise SystemExit(main())
