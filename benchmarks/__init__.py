"""Measurements that the documentation quotes; each prints a table and, last, one line of JSON."""
