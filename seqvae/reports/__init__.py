"""Text, figures and pages made from numbers and files; imports neither torch nor lightning."""
