"""Models, hardware and published measurements, and the cost models that follow from them; reads its own files only."""
