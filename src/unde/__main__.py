"""`python -m unde`, where the command `unde` is not on the path."""

from unde.cli import main

if __name__ == "__main__":
    main()
