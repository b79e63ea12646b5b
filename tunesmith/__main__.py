"""Entry point of `python -m tunesmith`: the `tunesmith` command."""

from tunesmith.cli import main

if __name__ == "__main__":
    main()
