"""Ways in from other libraries; each is imported on its own, and only where it is used."""
