"""flashsci inside other libraries, each in a module of its own that imports that library; none on ``import flashsci``."""
