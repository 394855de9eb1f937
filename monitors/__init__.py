"""Watching a training run: the formulas that a variational posterior is judged by.

A library of its own: it imports nothing of the application, so any Lightning project can install and use it.
"""
