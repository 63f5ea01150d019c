"""Bytes on disk: what an index folder holds, files that are whole or not there, checksums, locks, precisions."""
