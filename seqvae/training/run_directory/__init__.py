"""The run directory: who owns it, where a run resumes, and what happened to it."""
