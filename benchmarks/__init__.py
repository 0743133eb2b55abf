"""Figures of the pages: `benchmarks.results` measures them, `benchmarks.pages` writes them."""
