"""The command line: words in, settings out."""
