"""`python -m tunesmith` is the `tunesmith` command."""

from tunesmith.cli import main

if __name__ == "__main__":
    main()
