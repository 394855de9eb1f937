"""Figures, pages and text for terminals, made from the files of a run. Needs neither torch nor lightning."""
