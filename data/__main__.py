from data.cli import main

raise SystemExit(main())
