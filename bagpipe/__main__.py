from bagpipe.cli import main

raise SystemExit(main())
