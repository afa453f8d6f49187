"""Arithmetic that knows nothing of processes: factors, roots, bijections."""
