"""Workloads: public traces and synthetic ones from seeds. Knows no engine, no model and no machine."""
