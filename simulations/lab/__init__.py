"""Commands for researchers, besides the Flower App: comparisons, studies, benchmarks."""
