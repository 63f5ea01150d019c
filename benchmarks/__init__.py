"""What the package costs and what it stands: `python -m benchmarks.faults`, `python benchmarks/features.py`, …"""
