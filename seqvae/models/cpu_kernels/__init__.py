"""Operations that are faster on a CPU than those of torch; each file names its gain."""
