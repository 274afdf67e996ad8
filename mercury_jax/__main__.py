"""`python -m mercury_jax` is `mercury`."""

from mercury_jax.cli import main

raise SystemExit(main())
