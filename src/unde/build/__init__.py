"""From a model, a task and data to features on disk, and back: settling, shards, kernels, the session for queries."""
