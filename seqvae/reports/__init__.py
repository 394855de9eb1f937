"""What people look at: the files of a run -> figures, pages and text for terminals. Needs neither torch nor lightning."""
