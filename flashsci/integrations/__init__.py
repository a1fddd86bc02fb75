"""flashsci inside other libraries: one module each, which imports that library; ``import flashsci`` imports none."""
