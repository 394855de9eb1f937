"""The settings of every command: plain frozen dataclasses that import nothing heavy, and the flags made from them."""
