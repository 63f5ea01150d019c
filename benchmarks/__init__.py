"""Speed and memory, measured: each file is a program, and says what it measures."""
