"""The web page at /ui: three static files, and the JSON that the page polls."""
