"""Here so that tests in subfolders can import `cases`, `models` and `oracles`."""
