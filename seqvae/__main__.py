"""The command `seqvae` as `python -m seqvae`."""

import sys

from seqvae.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
