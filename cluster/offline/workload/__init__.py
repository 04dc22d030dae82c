"""What is asked and when: traces of others, and synthetic ones from seeds. Knows no engine, no model and no machine."""
