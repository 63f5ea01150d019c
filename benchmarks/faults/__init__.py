"""The fault campaign: kills, full disks, damaged files, hostile manifests and bad inputs, by the thousand.

python -m benchmarks.faults            # minutes; writes benchmarks/results/faults.json and docs/reliability.md
python -m benchmarks.faults --short    # seconds, writes nothing
"""
