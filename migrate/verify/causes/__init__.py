"""One file for each kind of cause; see `migrate.verify.cause`."""
