"""What runs a step plan: a rank with a real model, or simulated seconds."""
