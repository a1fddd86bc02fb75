"""The public functions: signatures, argument checks, and the plan of each kind of call."""
