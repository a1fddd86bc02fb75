"""Stand-ins for other packages, for code that stays as it is."""
