"""What the package costs and what it stands, measured: each file and folder is a program, and says what it measures."""
