"""The page of results: from experiments/results and the paper's numbers to docs/results.md."""
