"""What researchers run beside the Flower App: comparisons, studies, benchmarks."""
