QUICK = "--xla_backend_optimization_level=0"
"""Compile quickly, not well: most of a test's time would be the compiler's. In all processes, so that they compute the same bits."""
