"""`python -m ucxkv` is the command `ucxkv`."""

from ucxkv.cli import main

if __name__ == "__main__":
    main()
