"""What the control plane costs at a thousand workers; `part.py` describes the measurement."""
