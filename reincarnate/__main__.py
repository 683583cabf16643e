"""``python -m reincarnate``, for torchrun."""

from reincarnate.cli import main

if __name__ == "__main__":
    main()
