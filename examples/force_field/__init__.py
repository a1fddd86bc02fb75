"""A force field: a compact atom transformer trained on energies and forces (`make force-field`)."""
