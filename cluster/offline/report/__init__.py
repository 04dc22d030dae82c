"""Runs and searches as people and their tools see them: tables, pictures, one HTML page, a trace for Perfetto."""
