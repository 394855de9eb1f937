"""Settings, command line, objective, Lightning module, run and checkpoints: everything between a command and the fit."""
