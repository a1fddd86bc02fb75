"""Stand-ins for other packages, for code that is not changed."""
